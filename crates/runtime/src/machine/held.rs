//! Results that stay with the rank which made them until somebody asks for them (EX-11).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shardwright_core::{CallId, ModelId, ModuleId, Rank, RequestId, WorkerId};
use shardwright_wire::{
    Answer, AnswerKind, Body, Buffer, Delivery, ErrorReport, Fetch, HeldTensor, Message, Request,
    TensorMeta, TensorPart, Value, text,
};

use super::Machine;
use super::serving::{Parked, RequestKey};
use crate::failure::{Failure, FailureKind, ServerError};

/// Tensors of so few bytes come with the answer, though they are held too: asking for one costs more. What the first
/// answer to a call is decides for those of all microbatches: one that comes at once would overtake another one.
///
/// Ranks of a tensor-parallel group have batches of different sizes, and ask for tensors equally often all the same: there
/// only tensors without dims come.
const SMALL_BYTES: usize = 4096;

/// A call, alike for all microbatches: who makes it, of which module, and as which of its caller.
pub(super) type Site = (Rank, ModelId, Option<ModuleId>, CallId);

/// What a response will be, if the module does as it did before: its value, and its tensors' descriptions.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// What it will be, and what will be said of its tensors.
    pub kind: AnswerKind,
    /// The value.
    pub value: Value,
    /// The tensors.
    pub tensors: Vec<TensorMeta>,
}

impl Expected {
    /// What a response was.
    pub fn of(Answer { kind, body }: &Answer) -> Self {
        Self {
            kind: kind.clone(),
            value: body.value.clone(),
            tensors: body.tensors.iter().map(|part| part.meta.clone()).collect(),
        }
    }

    /// Whether an answer is as expected, and keeps no more than that.
    pub(crate) fn is(&self, Answer { kind, body }: &Answer) -> bool {
        self.kind.is_like(kind)
            && self.kind.keeps_all_of(kind)
            && self.value == body.value
            && self.tensors.len() == body.tensors.len()
            && self
                .tensors
                .iter()
                .zip(&body.tensors)
                .all(|(meta, part)| *meta == part.meta)
    }

    /// Whether a later response was the same, apart from what is kept: as long as memory is being sent, more refers to it.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.kind.is_like(&other.kind) && self.value == other.value && self.tensors == other.tensors
    }

    /// In one line, for an error.
    fn text(&self) -> String {
        let tensors: Vec<String> = self
            .tensors
            .iter()
            .map(|meta| {
                let grad = if meta.requires_grad {
                    ", requires grad"
                } else {
                    ""
                };
                format!("{}{:?}{grad}", meta.dtype, meta.shape)
            })
            .collect();
        format!(
            "{} with tensors [{}]",
            text::value(&self.value),
            tensors.join("; ")
        )
    }
}

/// What this rank holds for others, and what it has of theirs.
#[derive(Debug, Default)]
pub(super) struct HeldResults {
    /// The tensors of the answers to others' requests.
    results: BTreeMap<RequestKey, Vec<TensorPart>>,
    /// Which tensors come with the answers to a call, in this step.
    come: BTreeMap<(Site, u32), bool>,
    /// Who asks for tensors of an answer that is not there yet.
    wanted: BTreeMap<RequestKey, Vec<Fetch>>,
    /// Requests without an answer yet, of which nobody will ask for anything more.
    unneeded: BTreeSet<RequestKey>,
    /// Tensors that came before the request which they are for.
    early: BTreeMap<RequestKey, Vec<(u32, TensorPart)>>,
    /// Of this rank's own requests those whose results it needs no more, to be told to their holders.
    released: BTreeMap<Rank, Vec<RequestId>>,
}

impl HeldResults {
    /// How many answers' tensors are held.
    pub(super) fn len(&self) -> usize {
        self.results.len()
    }

    /// The requester needs nothing more of an answer.
    pub(super) fn forget(&mut self, key: RequestKey) {
        if self.results.remove(&key).is_none() {
            self.unneeded.insert(key);
        }
    }

    /// What a rank is to be told with the next request.
    pub(super) fn take_released(&mut self, to: Rank) -> Vec<RequestId> {
        self.released.remove(&to).unwrap_or_default()
    }

    pub(super) fn fill_early(&mut self, request: &mut Request) {
        for (index, part) in self
            .early
            .remove(&(request.requester, request.id))
            .into_iter()
            .flatten()
        {
            fill(request, index, part);
        }
    }
}

/// Puts a tensor's bytes where a request lacks them; false where it lacks no such tensor.
fn fill(request: &mut Request, index: u32, part: TensorPart) -> bool {
    let place = request.body.tensors.get_mut(index as usize);
    let Some(place) = place.filter(|place| !place.is_here()) else {
        return false;
    };
    let same = TensorMeta {
        requires_grad: place.meta.requires_grad,
        ..part.meta
    } == place.meta;
    if same {
        place.data = part.data;
        place.held = None;
    }
    same
}

impl Machine {
    /// EX-11: drops what is held, and what waits for it.
    pub(super) fn forget_held(&mut self) {
        self.held = HeldResults::default();
        self.parked = Parked::default();
    }

    /// Asks for a tensor that another rank holds; the id to wait for.
    pub fn fetch(
        &mut self,
        worker: WorkerId,
        tensor: HeldTensor,
        now: Duration,
    ) -> Result<RequestId, ServerError> {
        self.require_running("fetch")?;
        self.require_turn(worker, "fetch")?;
        self.require_in_pipeline(tensor.holder)?;
        if let Some(failure) = self.departed_peer(tensor.holder) {
            self.fail_with(failure, true, now);
            return Err(ServerError::Aborted);
        }
        let id = self.expect_tensor(tensor.request, tensor.holder);
        self.send_fetch(tensor, (self.config.rank, self.config.rank, id, 0), now);
        Ok(id)
    }

    /// Has a held tensor sent to the rank that a request goes to, as the tensor that it lacks there.
    pub(super) fn send_fetch(
        &mut self,
        tensor: HeldTensor,
        (to, requester, request, index): (Rank, Rank, RequestId, u32),
        now: Duration,
    ) {
        let fetch = Fetch {
            step: self.plan.step,
            tensor,
            to,
            requester,
            request,
            index,
        };
        self.route(tensor.holder, Message::Fetch(fetch), now);
    }

    /// The tensors of requests to a rank are needed no more: it is told so with the next request to it.
    pub fn release(&mut self, holder: Rank, requests: &[RequestId]) {
        let released = self.held.released.entry(holder).or_default();
        released.extend_from_slice(requests);
        for id in requests {
            if let Some(request) = self.outstanding.get_mut(id) {
                if request.response.is_some() {
                    self.outstanding.remove(id);
                } else {
                    request.unneeded = true;
                }
            }
        }
    }

    /// Keeps the tensors of an answer; the answer without those that are not small.
    pub(super) fn hold(&mut self, key: RequestKey, site: Site, body: Body) -> Body {
        if body.tensors.is_empty() {
            return body;
        }
        let (requester, request) = key;
        let holder = self.config.rank;
        let has_peers = self.has_peers();
        let tensors = body.tensors.iter().zip(0..).map(|(part, index)| {
            let is_small = if has_peers {
                part.meta.shape.is_empty()
            } else {
                part.data.len() <= SMALL_BYTES
            };
            let data = if *self.held.come.entry((site, index)).or_insert(is_small) {
                part.data.clone()
            } else {
                Buffer::default()
            };
            let is_held = has_peers || !part.data.is_empty();
            TensorPart {
                meta: part.meta.clone(),
                data,
                held: is_held.then_some(HeldTensor {
                    holder,
                    requester,
                    request,
                    index,
                }),
            }
        });
        let told = Body {
            value: body.value,
            tensors: tensors.collect(),
        };
        self.held.results.insert(key, body.tensors);
        told
    }

    /// Sends the tensors of an answer, which has been given, to those who have asked for them before.
    pub(super) fn send_wanted(&mut self, key: RequestKey, now: Duration) {
        for fetch in self.held.wanted.remove(&key).unwrap_or_default() {
            self.send_held(&fetch, now);
        }
        if self.held.unneeded.remove(&key) {
            self.held.results.remove(&key);
        }
    }

    pub(super) fn on_fetch(&mut self, from: Rank, fetch: Fetch, now: Duration) {
        let pipeline = &self.config.pipeline;
        let key = (fetch.tensor.requester, fetch.tensor.request);
        if ![from, fetch.to, fetch.requester]
            .iter()
            .all(|rank| pipeline.contains(rank))
        {
            self.stats.unexpected_messages += 1;
        } else if self.held.results.contains_key(&key) {
            self.send_held(&fetch, now);
        } else {
            self.held.wanted.entry(key).or_default().push(fetch);
        }
    }

    fn send_held(&mut self, fetch: &Fetch, now: Duration) {
        let key = (fetch.tensor.requester, fetch.tensor.request);
        let parts = self.held.results.get(&key);
        let Some(part) = parts.and_then(|parts| parts.get(fetch.tensor.index as usize)) else {
            self.stats.unexpected_messages += 1;
            return;
        };
        let delivery = Delivery {
            step: self.plan.step,
            requester: fetch.requester,
            request: fetch.request,
            index: fetch.index,
            body: Body {
                value: Value::Tensor(0),
                tensors: vec![part.clone()],
            },
        };
        if fetch.to != self.config.rank {
            self.account.sent(part.data.len() as u64);
        }
        self.route(fetch.to, Message::Delivery(Box::new(delivery)), now);
    }

    pub(super) fn on_delivery(&mut self, from: Rank, mut delivery: Delivery, now: Duration) {
        let key = (delivery.requester, delivery.request);
        let bytes = delivery.body.tensors.first().map(|part| part.data.len());
        if from != self.config.rank {
            self.account.received(bytes.unwrap_or_default() as u64);
        }
        if key.0 == self.config.rank && self.outstanding.contains_key(&key.1) {
            self.take_answer(from, key.1, delivery.body.into(), now);
            return;
        }
        let Some(part) = delivery.body.tensors.pop() else {
            self.stats.unexpected_messages += 1;
            return;
        };
        let Some(request) = self.parked.incomplete_mut(key) else {
            let early = self.held.early.entry(key).or_default();
            early.push((delivery.index, part));
            return;
        };
        // A tensor of another shape than was said is told by who said so.
        if fill(request, delivery.index, part) {
            self.admit_complete(key);
        }
    }

    /// An answer is not what this rank has taken it to be meanwhile: nothing of the step may stay.
    pub(super) fn depart(
        &mut self,
        id: RequestId,
        expected: &Expected,
        answer: &Answer,
        now: Duration,
    ) {
        let request = &self.outstanding[&id];
        let found = Expected::of(answer);
        let message = if expected.is_like(&found) {
            "something keeps memory of its arguments or results that nothing kept in the steps recorded for static mode"
                .to_owned()
        } else {
            format!(
                "given arguments alike, it returned {} where it had returned {} in the steps recorded for static mode",
                found.text(),
                expected.text(),
            )
        };
        let report = ErrorReport {
            rank: request.to,
            host: self.host(request.to),
            module: request
                .module
                .map(|module| self.module_name(request.model, module)),
            microbatch: Some(request.microbatch),
            phase: request.phase,
            kind: "DepartureError".to_owned(),
            message,
            traceback: String::new(),
        };
        let kind = FailureKind::Departure;
        self.fail_with(Failure { kind, report }, true, now);
    }
}
