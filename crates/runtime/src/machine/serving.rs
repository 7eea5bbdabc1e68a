//! Requests that this rank serves: when they may run, and their answers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use shardwright_core::{CallId, MicrobatchId, ModelId, Rank, RequestId};
use shardwright_schedule::ReadyKind;
use shardwright_wire::{Body, Message, Outcome, Request, Response, TensorPart, Work};

use super::dispatch::Subject;
use super::requests::{work_module, work_phase};
use super::{Action, Machine};
use crate::failure::ServerError;
use crate::trace::{TraceKind, TraceRecord, body_bytes};

/// Who made a request, and its id there.
pub(super) type Key = (Rank, RequestId);

/// A request that another rank waits for.
#[derive(Clone, Debug)]
pub(super) struct Served {
    work: Work,
    model: ModelId,
    microbatch: MicrobatchId,
    call: CallId,
    hold: bool,
}

/// Requests that may not run yet.
#[derive(Debug, Default)]
pub(super) struct Parked {
    /// Forward requests of the step that have their answer, and may be run backward.
    answered: BTreeSet<Key>,
    /// Backward requests and closes, by the forward that they came before the end of.
    behind: BTreeMap<Key, Box<Request>>,
    /// Forward requests whose tensors other ranks hold and which have not come, or that came after such a one.
    incomplete: BTreeMap<Key, Box<Request>>,
    /// Those in the order in which they came, by who made them and the microbatch: a caller's calls are
    /// executed in its order, since modules may keep state.
    lines: BTreeMap<(Rank, MicrobatchId), VecDeque<Key>>,
}

/// Whether all its tensors are here.
fn is_complete(request: &Request) -> bool {
    request.body.tensors.iter().all(TensorPart::is_here)
}

impl Parked {
    pub(super) fn incomplete_mut(&mut self, key: Key) -> Option<&mut Box<Request>> {
        self.incomplete.get_mut(&key)
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
            work: request.work.clone(),
            model: request.model,
            microbatch: request.microbatch,
            call: request.place.call,
            hold: request.hold,
        };
        self.account.received(body_bytes(&request.body));
        self.record_request(TraceKind::Receive, None, from, &request, now);
        self.serving.insert(key, served);
        self.held.fill_early(&mut request);
        let line = (request.requester, request.microbatch);
        let waits = matches!(request.work, Work::Forward { .. })
            && (self.parked.lines.contains_key(&line) || !is_complete(&request));
        if waits {
            self.parked.incomplete.insert(key, request);
            self.parked.lines.entry(line).or_default().push_back(key);
        } else {
            self.admit(request);
        }
    }

    /// A request whose tensors are all here runs, once what it follows has its answer.
    pub(super) fn admit(&mut self, mut request: Box<Request>) {
        for part in &mut request.body.tensors {
            part.held = None;
        }
        let kind = match &request.work {
            Work::Forward { .. } => ReadyKind::RequestForward,
            Work::Backward { forward, .. } | Work::Close { forward, .. } => {
                // The requester need not have waited for the forward's answer.
                let key = (request.requester, *forward);
                if !self.parked.answered.contains(&key) {
                    self.parked.behind.insert(key, request);
                    return;
                }
                if matches!(request.work, Work::Close { .. }) {
                    ReadyKind::RequestClose
                } else {
                    ReadyKind::RequestBackward
                }
            }
            Work::Control { .. } => {
                self.account.divides();
                self.controls.push_back(request);
                return;
            }
        };
        if let Some(order) = &mut self.order {
            order.asked_here(&request);
        }
        let microbatch = request.microbatch;
        self.push_ready(kind, microbatch, Subject::Request(request));
    }

    /// A request that waited for tensors has got one: those run that have all and are next in their line.
    pub(super) fn admit_complete(&mut self, key: Key) {
        let Some(request) = self.parked.incomplete.get(&key) else {
            return;
        };
        let line = (request.requester, request.microbatch);
        while let Some(first) = self
            .parked
            .lines
            .get(&line)
            .and_then(VecDeque::front)
            .copied()
        {
            if !self
                .parked
                .incomplete
                .get(&first)
                .is_some_and(|request| is_complete(request))
            {
                return;
            }
            if let Some(waiting) = self.parked.lines.get_mut(&line) {
                waiting.pop_front();
            }
            if let Some(request) = self.parked.incomplete.remove(&first) {
                self.admit(request);
            }
        }
        self.parked.lines.remove(&line);
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
        let key = (requester, id);
        let Some(served) = self.serving.remove(&key) else {
            return Err(ServerError::NotServed { requester, id });
        };
        self.step.served.count(&served.work);
        self.total.served.count(&served.work);
        let body = if served.hold {
            let site = (
                requester,
                served.model,
                work_module(&served.work),
                served.call,
            );
            self.hold(key, site, body)
        } else {
            body
        };
        let bytes = body_bytes(&body);
        self.account.sent(bytes);
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
            bytes,
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
        self.send_wanted(key, now);
        if matches!(served.work, Work::Forward { .. }) {
            self.parked.answered.insert(key);
            if let Some(request) = self.parked.behind.remove(&key) {
                self.admit(request);
            }
        }
        if self.main_has_work() {
            self.actions.push(Action::WakeMain);
        }
        Ok(())
    }
}
