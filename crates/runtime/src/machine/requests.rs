//! Requests that this rank has made, and requests that it serves.

use std::time::Duration;

use shardwright_core::{MicrobatchId, ModelId, ModuleId, Rank, RequestId, WorkerId};
use shardwright_schedule::ReadyKind;
use shardwright_wire::{Body, Message, Outcome, Phase, Request, Response, Work};

use super::dispatch::Subject;
use super::workers::WorkerState;
use super::{Action, Machine, NewRequest};
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
    pub(super) response: Option<Body>,
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

/// A request that another rank waits for.
#[derive(Clone, Debug)]
pub(super) struct Served {
    work: Work,
    model: ModelId,
    microbatch: MicrobatchId,
}

pub(super) fn work_module(work: &Work) -> Option<ModuleId> {
    match work {
        Work::Forward { module, .. }
        | Work::Backward { module, .. }
        | Work::Close { module, .. } => Some(*module),
        Work::Control { .. } => None,
    }
}

/// As what a worker that has waited in this phase is ready again.
pub(super) fn resumption(phase: Phase) -> ReadyKind {
    match phase {
        Phase::Forward => ReadyKind::ResumeForward,
        Phase::Backward => ReadyKind::ResumeBackward,
    }
}

pub(super) fn work_phase(work: &Work) -> Option<Phase> {
    match work {
        Work::Forward { .. } => Some(Phase::Forward),
        Work::Backward { .. } | Work::Close { .. } => Some(Phase::Backward),
        Work::Control { .. } => None,
    }
}

impl Machine {
    /// Makes a request. `worker` is `None` on the main thread.
    pub fn send_request(
        &mut self,
        worker: Option<WorkerId>,
        to: Rank,
        new: NewRequest,
        now: Duration,
    ) -> Result<RequestId, ServerError> {
        self.require_running("send_request")?;
        if let Some(worker) = worker {
            self.require_turn(worker, "send_request")?;
        }
        if !self.config.pipeline.contains(&to) {
            let pipeline = self.config.pipeline.iter().map(|rank| rank.0).collect();
            return Err(ServerError::NotInPipeline { rank: to, pipeline });
        }
        if let Some(failure) = self.departed_peer(to) {
            self.fail_with(failure, true, now);
            return Err(ServerError::Aborted);
        }
        self.next_request += 1;
        let id = RequestId(self.next_request);
        self.step.sent.count(&new.work);
        self.total.sent.count(&new.work);
        self.outstanding.insert(
            id,
            Outstanding {
                to,
                model: new.model,
                module: work_module(&new.work),
                phase: work_phase(&new.work),
                microbatch: new.microbatch,
                response: None,
                waiter: None,
            },
        );
        let request = Request {
            id,
            step: self.plan.step,
            model: new.model,
            work: new.work,
            microbatch: new.microbatch,
            requester: self.config.rank,
            place: new.place,
            context: new.context,
            body: new.body,
        };
        self.record_request(TraceKind::Send, worker, to, &request, now);
        self.route(to, Message::Request(Box::new(request)), now);
        Ok(id)
    }

    /// Answers a request that this rank serves. In a failing step the answer is dropped:
    /// the requester learns of the failure itself.
    pub fn respond(
        &mut self,
        requester: Rank,
        id: RequestId,
        body: Body,
        now: Duration,
    ) -> Result<(), ServerError> {
        match self.require_running("respond") {
            Err(ServerError::Aborted | ServerError::Failed(_)) => return Ok(()),
            other => other?,
        }
        let Some(served) = self.serving.remove(&(requester, id)) else {
            return Err(ServerError::NotServed { requester, id });
        };
        self.step.served.count(&served.work);
        self.total.served.count(&served.work);
        self.trace.push(TraceRecord {
            step: self.plan.step,
            kind: TraceKind::Send,
            worker: None,
            phase: work_phase(&served.work),
            model: Some(served.model),
            module: work_module(&served.work),
            microbatch: Some(served.microbatch),
            peer: Some(requester),
            request: Some(id),
            bytes: body_bytes(&body),
            start: now,
            end: now,
        });
        let response = Response {
            id,
            step: self.plan.step,
            responder: self.config.rank,
            outcome: Outcome::Value(body),
        };
        self.route(requester, Message::Response(Box::new(response)), now);
        if self.main_has_work() {
            self.actions.push(Action::WakeMain);
        }
        Ok(())
    }

    /// The answers to requests whose wait is over, in the order asked for.
    pub fn take_responses(&mut self, requests: &[RequestId]) -> Result<Vec<Body>, ServerError> {
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
    fn route(&mut self, to: Rank, message: Message, now: Duration) {
        if to == self.config.rank {
            self.deliver(to, message, now);
        } else {
            self.actions.push(Action::Send { to, message });
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

    pub(super) fn on_request(&mut self, from: Rank, request: Box<Request>, now: Duration) {
        if !self.config.pipeline.contains(&from) || request.requester != from {
            self.stats.unexpected_messages += 1;
            return;
        }
        let served = Served {
            work: request.work.clone(),
            model: request.model,
            microbatch: request.microbatch,
        };
        self.record_request(TraceKind::Receive, None, from, &request, now);
        self.serving.insert((from, request.id), served);
        let microbatch = request.microbatch;
        let kind = match &request.work {
            Work::Forward { .. } => ReadyKind::RequestForward,
            Work::Backward { .. } => ReadyKind::RequestBackward,
            Work::Close { .. } => ReadyKind::RequestClose,
            Work::Control { .. } => {
                self.controls.push_back(request);
                return;
            }
        };
        self.push_ready(kind, microbatch, Subject::Request(request));
    }

    pub(super) fn on_response(&mut self, from: Rank, response: Response, now: Duration) {
        let Some(request) = self
            .outstanding
            .get_mut(&response.id)
            .filter(|request| request.to == from && request.response.is_none())
        else {
            self.stats.unexpected_messages += 1;
            return;
        };
        let body = match response.outcome {
            Outcome::Value(body) => body,
            Outcome::Failed(report) => {
                self.fail_with(Failure::remote(report), false, now);
                return;
            }
        };
        let record = TraceRecord {
            step: self.plan.step,
            kind: TraceKind::Receive,
            worker: None,
            phase: request.phase,
            model: Some(request.model),
            module: request.module,
            microbatch: Some(request.microbatch),
            peer: Some(from),
            request: Some(response.id),
            bytes: body_bytes(&body),
            start: now,
            end: now,
        };
        let microbatch = request.microbatch;
        request.response = Some(body);
        let waiter = request.waiter;
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

    fn record_request(
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
            phase: work_phase(&request.work),
            model: Some(request.model),
            module: work_module(&request.work),
            microbatch: Some(request.microbatch),
            peer: Some(peer),
            request: Some(request.id),
            bytes: body_bytes(&request.body),
            start: now,
            end: now,
        });
    }
}
