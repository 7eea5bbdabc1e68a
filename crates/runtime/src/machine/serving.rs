//! Requests that this rank serves: when they may run, and their answers.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shardwright_core::{CallId, CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId};
use shardwright_schedule::ReadyKind;
use shardwright_wire::{
    Answer, Message, Request, Response, ResponseOutcome, TensorPart, Work, WorkKind,
};

use super::dispatch::{ReadyItem, Subject};
use super::{Effect, Machine};
use crate::failure::ServerError;
use crate::trace::{TraceKind, TraceRecord, body_bytes};

/// Who made a request, and its id there.
pub(super) type RequestKey = (Rank, RequestId);

/// A request that another rank waits for.
#[derive(Clone, Debug)]
pub(super) struct Served {
    kind: WorkKind,
    model: ModelId,
    module: Option<ModuleId>,
    microbatch: MicrobatchId,
    call: CallId,
    hold: bool,
}

/// Requests that may not run yet.
#[derive(Debug, Default)]
pub(super) struct Parked {
    /// Forward requests of the step that have their answer, and may be run backward.
    answered: BTreeSet<RequestKey>,
    /// Backward requests and closes, by the forward that they came before the end of.
    behind: BTreeMap<RequestKey, Box<Request>>,
    /// Forward requests whose tensors other ranks hold and which have not come.
    incomplete: BTreeMap<RequestKey, Box<Request>>,
    /// EX-14: by microbatch, the forward requests that have come and not begun, in the order of the sequential program.
    lines: BTreeMap<MicrobatchId, BTreeSet<(CallPath, RequestKey)>>,
}

/// Whether all its tensors are here.
fn is_complete(request: &Request) -> bool {
    request.body.tensors.iter().all(TensorPart::is_here)
}

impl Parked {
    pub(super) fn incomplete_mut(&mut self, key: RequestKey) -> Option<&mut Box<Request>> {
        self.incomplete.get_mut(&key)
    }

    fn lines_up(&mut self, request: &Request) {
        let line = self.lines.entry(request.microbatch).or_default();
        line.insert((request.path.clone(), (request.requester, request.id)));
    }

    /// Whether no forward of the microbatch that has come and not begun goes before this one in the sequential program.
    pub(super) fn is_first(&self, request: &Request) -> bool {
        let line = self.lines.get(&request.microbatch);
        let first = line.and_then(BTreeSet::first);
        first.is_none_or(|(_, key)| *key == (request.requester, request.id))
    }

    /// A forward request has the turn.
    pub(super) fn begins(&mut self, request: &Request) {
        if let Some(line) = self.lines.get_mut(&request.microbatch) {
            line.remove(&(request.path.clone(), (request.requester, request.id)));
        }
    }
}

impl Machine {
    pub(super) fn on_request(&mut self, from: Rank, mut request: Box<Request>, now: Duration) {
        let pipeline = &self.config.pipeline;
        let key = (request.requester, request.id);
        if !pipeline.contains(&from)
            || !pipeline.contains(&request.requester)
            || self.serving.contains_key(&key)
        {
            self.stats.unexpected_messages += 1;
            return;
        }
        for released in std::mem::take(&mut request.released) {
            self.held.forget((from, released));
        }
        let served = Served {
            kind: request.work.kind(),
            model: request.model,
            module: request.work.module(),
            microbatch: request.microbatch,
            call: request.place.call,
            hold: request.hold,
        };
        self.account.received(body_bytes(&request.body));
        self.record_request(TraceKind::Receive, None, from, &request, now);
        self.serving.insert(key, served);
        self.held.fill_early(&mut request);
        if !matches!(request.work, Work::Forward(_)) {
            self.admit(request);
            return;
        }
        self.parked.lines_up(&request);
        if let Some(order) = &mut self.order {
            order.asked_here(&request);
        }
        if is_complete(&request) {
            self.admit(request);
        } else {
            self.parked.incomplete.insert(key, request);
        }
    }

    /// A request whose tensors are all here may run, once what it follows has its answer.
    pub(super) fn admit(&mut self, mut request: Box<Request>) {
        for part in &mut request.body.tensors {
            part.held = None;
        }
        if let Some(forward) = request.work.forward() {
            // The requester need not have waited for the forward's answer.
            let key = (request.requester, forward);
            if !self.parked.answered.contains(&key) {
                self.parked.behind.insert(key, request);
                return;
            }
        }
        let kind = match &request.work {
            Work::Forward(_) => ReadyKind::RequestForward,
            Work::Backward(_) => ReadyKind::RequestBackward,
            Work::Close(_) => ReadyKind::RequestClose,
            Work::Control { .. } => {
                self.account.divides();
                self.controls.push_back(request);
                return;
            }
        };
        let microbatch = request.microbatch;
        self.push_ready(kind, microbatch, Subject::Request(request));
    }

    /// A request that waited for tensors has got one: it may run if that was the last.
    pub(super) fn admit_complete(&mut self, key: RequestKey) {
        if let Entry::Occupied(waiting) = self.parked.incomplete.entry(key)
            && is_complete(waiting.get())
        {
            let request = waiting.remove();
            self.admit(request);
        }
    }

    /// The ready items among which the schedule chooses, with their places.
    ///
    /// EX-14: of a microbatch's forward requests that is the one which the sequential program has first. Where another
    /// rank's order is followed, that rank has seen to this.
    pub(super) fn eligible(&self) -> impl Iterator<Item = (usize, &ReadyItem)> {
        let items = self.ready.iter().enumerate();
        items.filter(|(_, item)| match &item.subject {
            Subject::Request(request) if item.ready.kind == ReadyKind::RequestForward => {
                self.parked.is_first(request)
            }
            _ => true,
        })
    }

    /// Answers a request that this rank serves. In a failing step the answer is dropped:
    /// the requester learns of the failure itself.
    pub fn respond(
        &mut self,
        requester: Rank,
        id: RequestId,
        answer: impl Into<Answer>,
        now: Duration,
    ) -> Result<(), ServerError> {
        match self.require_running("respond") {
            Err(ServerError::Aborted | ServerError::Failed(_)) => return Ok(()),
            other => other?,
        }
        let key = (requester, id);
        let Some(served) = self.serving.remove(&key) else {
            return Err(ServerError::NotServed { requester, id });
        };
        self.step.served.count(served.kind);
        self.total.served.count(served.kind);
        let mut answer = answer.into();
        if served.hold {
            let site = (requester, served.model, served.module, served.call);
            answer.body = self.hold(key, site, answer.body);
        }
        let bytes = body_bytes(&answer.body);
        self.account.sent(bytes);
        self.trace.push(TraceRecord {
            step: self.plan.step,
            kind: TraceKind::Send,
            worker: None,
            phase: served.kind.phase(),
            model: Some(served.model),
            module: served.module,
            microbatch: Some(served.microbatch),
            peer: Some(requester),
            request: Some(id),
            bytes,
            start: now,
            end: now,
        });
        let response = Response {
            id,
            step: self.plan.step,
            responder: self.config.rank,
            outcome: ResponseOutcome::Value(answer),
        };
        self.route(requester, Message::Response(Box::new(response)), now);
        self.send_wanted(key, now);
        if served.kind == WorkKind::Forward {
            self.parked.answered.insert(key);
            if let Some(request) = self.parked.behind.remove(&key) {
                self.admit(request);
            }
        }
        if self.main_has_work() {
            self.effects.push(Effect::WakeMain);
        }
        Ok(())
    }
}
