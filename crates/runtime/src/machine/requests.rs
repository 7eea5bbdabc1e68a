//! Requests that this rank has made.

use std::time::Duration;

use shardwright_core::{CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId, WorkerId};
use shardwright_schedule::ReadyKind;
use shardwright_wire::{
    Answer, Message, Phase, Request, Response, ResponseOutcome, Work, WorkKind,
};

use super::dispatch::Subject;
use super::held::Expected;
use super::workers::WorkerState;
use super::{Effect, Machine, NewRequest};
use crate::failure::{Failure, ServerError};
use crate::trace::{TraceKind, TraceRecord, body_bytes};

/// A request that this rank has made.
#[derive(Debug)]
pub(super) struct Outstanding {
    pub(super) to: Rank,
    pub(super) model: ModelId,
    pub(super) module: Option<ModuleId>,
    pub(super) phase: Option<Phase>,
    pub(super) microbatch: MicrobatchId,
    pub(super) response: Option<Answer>,
    /// What the response is taken to be until it is there.
    pub(super) expected: Option<Expected>,
    /// Whether nobody will look at the response.
    pub(super) unneeded: bool,
    waiter: Option<Waiter>,
}

impl Outstanding {
    /// Whether this worker waits for the response, which is not there.
    pub(super) fn waits(&self, worker: WorkerId) -> bool {
        self.waiter == Some(Waiter::Worker(worker)) && self.response.is_none()
    }
}

/// Who waits for a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiter {
    Worker(WorkerId),
    Main,
}

/// What a request is about, as far as its requester has to know that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// What is asked for.
    pub kind: WorkKind,
    /// The model.
    pub model: ModelId,
    /// The module, where it is about one.
    pub module: Option<ModuleId>,
    /// Of a backward or a close, the forward request.
    pub forward: Option<RequestId>,
    /// The microbatch.
    pub microbatch: MicrobatchId,
}

impl About {
    /// What work of a model is about.
    pub fn new(model: ModelId, work: &Work, microbatch: MicrobatchId) -> Self {
        Self {
            kind: work.kind(),
            model,
            module: work.module(),
            forward: work.forward(),
            microbatch,
        }
    }
}

/// As what a worker that has waited in this phase is ready again.
pub(super) fn resumption(phase: Phase) -> ReadyKind {
    match phase {
        Phase::Forward => ReadyKind::ResumeForward,
        Phase::Backward => ReadyKind::ResumeBackward,
    }
}

impl Machine {
    /// Makes a request. `worker` is `None` on the main thread.
    pub fn send_request(
        &mut self,
        worker: Option<WorkerId>,
        to: Rank,
        mut new: NewRequest,
        now: Duration,
    ) -> Result<RequestId, ServerError> {
        self.require_running("send_request")?;
        if let Some(worker) = worker {
            self.require_turn(worker, "send_request")?;
        }
        self.require_in_pipeline(to)?;
        if let Some(failure) = self.departed_peer(to) {
            self.fail_with(failure, true, now);
            return Err(ServerError::Aborted);
        }
        let about = About::new(new.model, &new.work, new.microbatch);
        let expected = new.expected.take();
        self.tell_asked(worker, to, &about, expected.is_some());
        let id = self.expect_answer(to, &about, expected);
        self.order_asks(worker, id, &about);
        self.send(worker, (self.config.rank, id), to, new, now);
        Ok(id)
    }

    /// Makes a request that another rank sends in this rank's name: the one that has what it is about
    /// (see [`Machine::send_request_for`]). The answer comes here.
    pub fn announce_request(
        &mut self,
        worker: WorkerId,
        to: Rank,
        about: &About,
        expected: Option<Expected>,
    ) -> Result<RequestId, ServerError> {
        self.require_running("announce_request")?;
        self.require_turn(worker, "announce_request")?;
        self.require_in_pipeline(to)?;
        self.tell_asked(Some(worker), to, about, expected.is_some());
        let id = self.expect_answer(to, about, expected);
        self.order_asks(Some(worker), id, about);
        Ok(id)
    }

    /// Sends a request in the name of the rank that has announced it.
    pub fn send_request_for(
        &mut self,
        worker: WorkerId,
        announced: (Rank, RequestId),
        to: Rank,
        new: NewRequest,
        now: Duration,
    ) -> Result<(), ServerError> {
        self.require_running("send_request_for")?;
        self.require_turn(worker, "send_request_for")?;
        self.require_in_pipeline(to)?;
        self.require_in_pipeline(announced.0)?;
        if let Some(failure) = self.departed_peer(to) {
            self.fail_with(failure, true, now);
            return Err(ServerError::Aborted);
        }
        self.send(Some(worker), announced, to, new, now);
        Ok(())
    }

    fn expect_answer(&mut self, to: Rank, about: &About, expected: Option<Expected>) -> RequestId {
        let id = self.next_id();
        self.step.sent.count(about.kind);
        self.total.sent.count(about.kind);
        if about.kind == WorkKind::Control {
            self.account.divides();
        }
        self.outstanding.insert(
            id,
            Outstanding {
                to,
                model: about.model,
                module: about.module,
                phase: about.kind.phase(),
                microbatch: about.microbatch,
                response: None,
                expected,
                unneeded: false,
                waiter: None,
            },
        );
        id
    }

    pub(super) fn next_id(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request)
    }

    /// Expects a tensor of an earlier answer, which comes as an answer of its own.
    pub(super) fn expect_tensor(&mut self, like: RequestId, holder: Rank) -> RequestId {
        let id = self.fetch_id();
        let about = self.outstanding.get(&like);
        let tensor = Outstanding {
            to: holder,
            model: about.map_or(ModelId(0), |request| request.model),
            module: about.and_then(|request| request.module),
            phase: Some(Phase::Forward),
            microbatch: about.map_or(MicrobatchId(0), |request| request.microbatch),
            response: None,
            expected: None,
            unneeded: false,
            waiter: None,
        };
        self.outstanding.insert(id, tensor);
        id
    }

    fn send(
        &mut self,
        worker: Option<WorkerId>,
        (requester, id): (Rank, RequestId),
        to: Rank,
        new: NewRequest,
        now: Duration,
    ) {
        self.account.sent(body_bytes(&new.body));
        // A request in another rank's name comes after all that its sender did: see `docs/design/execution.md`.
        let path = worker.map_or_else(CallPath::default, |worker| {
            self.workers[worker.0 as usize].next_path()
        });
        let lacking: Vec<_> = (0..)
            .zip(&new.body.tensors)
            .filter_map(|(index, part)| Some((index, part.held.filter(|_| !part.is_here())?)))
            .collect();
        let request = Request {
            id,
            step: self.plan.step,
            model: new.model,
            work: new.work,
            microbatch: new.microbatch,
            requester,
            place: new.place,
            path,
            hold: new.hold,
            released: self.held.take_released(to),
            body: new.body,
        };
        self.record_request(TraceKind::Send, worker, to, &request, now);
        self.route(to, Message::Request(Box::new(request)), now);
        for (index, tensor) in lacking {
            self.send_fetch(tensor, (to, requester, id, index), now);
        }
    }

    /// Whether the answers to these requests are there.
    ///
    /// Never under a tensor-parallel order: on another rank of the group they may not be there yet.
    pub fn are_answered(&self, requests: &[RequestId]) -> bool {
        !self.has_peers()
            && requests.iter().all(|id| {
                let request = self.outstanding.get(id);
                request.is_some_and(|request| request.response.is_some())
            })
    }

    /// The answers to requests whose wait is over, in the order asked for.
    pub fn take_responses(&mut self, requests: &[RequestId]) -> Result<Vec<Answer>, ServerError> {
        requests
            .iter()
            .map(|id| {
                let found = self.outstanding.remove(id);
                found
                    .and_then(|request| request.response)
                    .ok_or(ServerError::UnknownRequest { id: *id })
            })
            .collect()
    }

    /// Sends a message, or takes it in at once when it is for this rank.
    pub(super) fn route(&mut self, to: Rank, message: Message, now: Duration) {
        if to == self.config.rank {
            self.deliver(to, message, now);
        } else {
            self.effects.push(Effect::Send { to, message });
        }
    }

    /// Says who waits for these requests; how many responses are missing.
    pub(super) fn watch_requests(
        &mut self,
        requests: &[RequestId],
        worker: Option<WorkerId>,
    ) -> Result<u32, ServerError> {
        if let Some(id) = requests
            .iter()
            .find(|id| !self.outstanding.contains_key(id))
        {
            return Err(ServerError::UnknownRequest { id: *id });
        }
        let waiter = worker.map_or(Waiter::Main, Waiter::Worker);
        let mut missing = 0;
        for id in requests {
            let request = self.outstanding.get_mut(id).expect("looked up above");
            if request.response.is_none() && request.waiter.replace(waiter).is_none() {
                missing += 1;
            }
        }
        Ok(missing)
    }

    pub(super) fn on_response(&mut self, from: Rank, response: Response, now: Duration) {
        match response.outcome {
            ResponseOutcome::Value(answer) => self.take_answer(from, response.id, answer, now),
            ResponseOutcome::Failed(report) => self.fail_with(Failure::remote(report), false, now),
        }
    }

    /// An answer to a request of this rank, or a tensor that it has asked for.
    pub(super) fn take_answer(&mut self, from: Rank, id: RequestId, answer: Answer, now: Duration) {
        let Some(request) = self
            .outstanding
            .get_mut(&id)
            .filter(|request| request.to == from && request.response.is_none())
        else {
            self.stats.unexpected_messages += 1;
            return;
        };
        if let Some(expected) = request.expected.take()
            && !expected.is(&answer)
        {
            self.depart(id, &expected, &answer, now);
            return;
        }
        let record = TraceRecord {
            step: self.plan.step,
            kind: TraceKind::Receive,
            worker: None,
            phase: request.phase,
            model: Some(request.model),
            module: request.module,
            microbatch: Some(request.microbatch),
            peer: Some(from),
            request: Some(id),
            bytes: body_bytes(&answer.body),
            start: now,
            end: now,
        };
        let (microbatch, phase) = (request.microbatch, request.phase);
        request.response = Some(answer);
        let waiter = request.waiter;
        if request.unneeded {
            self.outstanding.remove(&id);
        }
        self.account.received(record.bytes);
        self.trace.push(record);
        match waiter {
            None => {}
            Some(Waiter::Main) => {
                if let Some(missing) = self.main_missing.as_mut() {
                    *missing = missing.saturating_sub(1);
                }
            }
            Some(Waiter::Worker(worker)) => self.count_down(worker, microbatch),
        }
        if phase == Some(Phase::Forward) {
            self.end_forwards();
        }
    }

    /// One of the responses that a PENDING worker waits for is there.
    fn count_down(&mut self, worker: WorkerId, microbatch: MicrobatchId) {
        let slot = &mut self.workers[worker.0 as usize];
        let WorkerState::AwaitsResponses { missing, phase } = &mut slot.state else {
            return;
        };
        *missing -= 1;
        if *missing == 0 {
            let kind = resumption(*phase);
            let microbatch = slot.task.map_or(microbatch, |task| task.microbatch);
            self.push_ready(kind, microbatch, Subject::Worker(worker));
        }
    }

    pub(super) fn record_request(
        &mut self,
        kind: TraceKind,
        worker: Option<WorkerId>,
        peer: Rank,
        request: &Request,
        now: Duration,
    ) {
        self.trace.push(TraceRecord {
            step: self.plan.step,
            kind,
            worker,
            phase: request.work.kind().phase(),
            model: Some(request.model),
            module: request.work.module(),
            microbatch: Some(request.microbatch),
            peer: Some(peer),
            request: Some(request.id),
            bytes: body_bytes(&request.body),
            start: now,
            end: now,
        });
    }
}
