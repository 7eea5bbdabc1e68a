//! Workers: threads that hold suspended stacks. One EXECUTES, others are PENDING or IDLE (EX-1).

use std::time::Duration;

use shardwright_core::{CallPath, MicrobatchId, RequestId, WorkerId};
use shardwright_wire::Phase;

use super::dispatch::{Start, Subject, Turn};
use super::requests::resumption;
use super::stays::StateKey;
use super::tasks::{CurrentTask, Task};
use super::{Machine, Stage};
use crate::failure::{Failure, FailureKind, ServerError};
use crate::trace::{TraceKind, TraceRecord};

/// What a worker finds when it has the turn.
#[derive(Clone, Debug, PartialEq)]
pub enum Grant {
    /// A new task.
    Task(Task),
    /// What it waited for is there.
    Resume,
    /// Its stack has to go.
    Aborted,
    /// The server is closed; the thread may end.
    Closed,
}

/// Whether a wait is over at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// It is; the worker keeps the turn.
    Over,
    /// The worker is PENDING until it finds a grant.
    Suspended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkerState {
    Starting,
    Idle,
    Executing,
    /// Waits for responses of which this many are missing, in a phase.
    AwaitsResponses {
        missing: u32,
        phase: Phase,
    },
    /// A root task that has reached its backward.
    AwaitsBackward,
    /// A task that has come to what a module keeps; `open` once its microbatch may enter.
    AwaitsState {
        key: StateKey,
        open: bool,
    },
    /// Its thread is no more.
    Gone,
}

#[derive(Debug)]
pub(super) struct WorkerSlot {
    pub(super) state: WorkerState,
    pub(super) task: Option<CurrentTask>,
    pub(super) grant: Option<Grant>,
    /// Its task's place in the sequential program, and how many requests that task has made.
    path: CallPath,
    num_requests: u32,
    /// Since when it is in its state.
    pub(super) since: Duration,
}

impl WorkerSlot {
    /// A thread that comes up.
    pub(super) fn starting(now: Duration) -> Self {
        Self {
            state: WorkerState::Starting,
            task: None,
            grant: None,
            path: CallPath::default(),
            num_requests: 0,
            since: now,
        }
    }

    /// Where in the sequential program the next request of its task stands.
    pub(super) fn next_path(&mut self) -> CallPath {
        let path = self.path.followed_by(self.num_requests);
        self.num_requests += 1;
        path
    }

    pub(super) fn is_pending(&self) -> bool {
        matches!(
            self.state,
            WorkerState::AwaitsResponses { .. }
                | WorkerState::AwaitsBackward
                | WorkerState::AwaitsState { .. }
        )
    }
}

impl Machine {
    /// A worker has ended its task, or has just come up: it gives up the turn and is IDLE.
    pub fn worker_returns(&mut self, worker: WorkerId, now: Duration) -> Result<(), ServerError> {
        let Some(slot) = self.workers.get_mut(worker.0 as usize) else {
            return Err(ServerError::UnknownWorker { worker });
        };
        if self.closed {
            slot.state = WorkerState::Idle;
            slot.grant = Some(Grant::Closed);
            return Ok(());
        }
        let was = slot.state;
        let task = slot.task.take();
        match was {
            WorkerState::Starting => {
                slot.state = WorkerState::Idle;
                slot.since = now;
                if self.start == Start::UnderWay(worker) {
                    self.start = Start::NotWanted;
                }
            }
            WorkerState::Executing => {
                if let Some(task) = task {
                    self.tell_end(&task);
                    self.finish_task(worker, &task, now);
                }
                self.release_turn(worker, task, WorkerState::Idle, now);
                self.busy_workers -= 1;
            }
            WorkerState::Idle => {}
            WorkerState::AwaitsResponses { .. }
            | WorkerState::AwaitsBackward
            | WorkerState::AwaitsState { .. }
            | WorkerState::Gone => {
                slot.task = task;
                return Err(ServerError::NotExecuting {
                    worker,
                    call: "next_task",
                });
            }
        }
        self.dispatch(Some(worker), now);
        Ok(())
    }

    /// The thread of a worker is gone, without a word: the step fails on every rank.
    pub fn worker_gone(&mut self, worker: WorkerId, now: Duration) {
        let Some(slot) = self.workers.get_mut(worker.0 as usize) else {
            return;
        };
        let was = std::mem::replace(&mut slot.state, WorkerState::Gone);
        let task = slot.task.take();
        slot.grant = None;
        if was == WorkerState::Gone || self.closed {
            return;
        }
        if self.start == Start::UnderWay(worker) {
            self.start = Start::NotWanted;
        }
        if !matches!(was, WorkerState::Starting | WorkerState::Idle) {
            self.busy_workers -= 1;
        }
        if self.turn == Turn::Worker(worker) {
            self.turn = Turn::Free;
        }
        let message = format!("the thread of worker {worker} has ended in the middle of a step");
        let failure = self.own_failure(FailureKind::Remote, "WorkerGone", message, task.as_ref());
        self.fail_with(failure, true, now);
        self.dispatch(None, now);
    }

    /// Whether nobody computes on this rank.
    pub fn turn_is_free(&self) -> bool {
        self.turn == Turn::Free
    }

    /// Whether a worker finds something when it wakes.
    pub fn has_grant(&self, worker: WorkerId) -> bool {
        let slot = self.workers.get(worker.0 as usize);
        slot.is_some_and(|slot| slot.grant.is_some())
    }

    /// What a worker that was told to wake finds; at most once per grant.
    pub fn take_grant(&mut self, worker: WorkerId) -> Option<Grant> {
        self.workers.get_mut(worker.0 as usize)?.grant.take()
    }

    /// A worker waits for responses: PENDING, unless all are there and nothing that is ready
    /// goes before it (EX-3).
    pub fn wait(
        &mut self,
        worker: WorkerId,
        requests: &[RequestId],
        phase: Phase,
        now: Duration,
    ) -> Result<Waiting, ServerError> {
        self.require_running("wait")?;
        self.require_turn(worker, "wait")?;
        let missing = self.watch_requests(requests, Some(worker))?;
        if missing == 0 {
            let kind = resumption(phase);
            let task = self.workers[worker.0 as usize].task;
            let microbatch = task.map_or(MicrobatchId(0), |task| task.microbatch);
            if self.goes_first(worker, kind, microbatch) {
                self.continues(worker, kind, microbatch);
                return Ok(Waiting::Over);
            }
            self.push_ready(kind, microbatch, Subject::Worker(worker));
        }
        self.suspend(worker, WorkerState::AwaitsResponses { missing, phase }, now);
        Ok(Waiting::Suspended)
    }

    /// The server ends: idle workers may go, suspended ones unwind.
    pub fn close(&mut self) {
        self.closed = true;
        for index in 0..self.workers.len() {
            let worker = &mut self.workers[index];
            match worker.state {
                WorkerState::Idle => worker.grant = Some(Grant::Closed),
                WorkerState::AwaitsResponses { .. }
                | WorkerState::AwaitsBackward
                | WorkerState::AwaitsState { .. } => {
                    worker.grant = Some(Grant::Aborted);
                }
                WorkerState::Starting | WorkerState::Executing | WorkerState::Gone => {}
            }
            self.effects
                .push(super::Effect::WakeWorker(WorkerId(index as u32)));
        }
        self.effects.push(super::Effect::WakeMain);
    }

    pub(super) fn require_turn(
        &self,
        worker: WorkerId,
        call: &'static str,
    ) -> Result<(), ServerError> {
        let slot = self
            .workers
            .get(worker.0 as usize)
            .ok_or(ServerError::UnknownWorker { worker })?;
        if slot.state == WorkerState::Executing && self.turn == Turn::Worker(worker) {
            Ok(())
        } else {
            Err(ServerError::NotExecuting { worker, call })
        }
    }

    pub(super) fn suspend(&mut self, worker: WorkerId, state: WorkerState, now: Duration) {
        let task = self.workers[worker.0 as usize].task;
        self.release_turn(worker, task, state, now);
        self.step.suspensions += 1;
        self.total.suspensions += 1;
        let pending = self
            .workers
            .iter()
            .filter(|worker| worker.is_pending())
            .count() as u64;
        self.step.max_pending = self.step.max_pending.max(pending);
        self.total.max_pending = self.total.max_pending.max(pending);
        self.dispatch(None, now);
    }

    /// Takes the turn from the worker that has it, and records the slice of its task that ends.
    fn release_turn(
        &mut self,
        worker: WorkerId,
        task: Option<CurrentTask>,
        state: WorkerState,
        now: Duration,
    ) {
        let slot = &mut self.workers[worker.0 as usize];
        let start = std::mem::replace(&mut slot.since, now);
        slot.state = state;
        if let Some(task) = task {
            self.account.ran(&task, now);
            self.record_task(worker, task.kind, &task, start, now);
        }
        self.turn = Turn::Free;
        self.tell_peers();
        self.compare_with_leader(now);
        self.stall.progress(now);
    }

    /// Gives the turn to a worker, which finds `grant` when it wakes.
    pub(super) fn grant(&mut self, worker: WorkerId, grant: Grant, now: Duration) {
        debug_assert!(self.turn == Turn::Free, "EX-1: the turn has one holder");
        let slot = &mut self.workers[worker.0 as usize];
        let was = std::mem::replace(&mut slot.state, WorkerState::Executing);
        let since = std::mem::replace(&mut slot.since, now);
        match &grant {
            Grant::Task(task) => {
                slot.task = Some(CurrentTask::of(task));
                slot.path = task.path();
                slot.num_requests = 0;
                self.busy_workers += 1;
                self.step.tasks += 1;
                self.total.tasks += 1;
            }
            Grant::Resume | Grant::Aborted => {
                if let Some(mut task) = slot.task {
                    let phase = task.phase;
                    if was == WorkerState::AwaitsBackward {
                        task.phase = Phase::Backward;
                        slot.task = Some(task);
                    }
                    let waited = match was {
                        WorkerState::AwaitsResponses { phase, .. } => phase,
                        _ => phase,
                    };
                    self.record_task(
                        worker,
                        TraceKind::Wait,
                        &CurrentTask {
                            phase: waited,
                            ..task
                        },
                        since,
                        now,
                    );
                }
            }
            Grant::Closed => {}
        }
        self.workers[worker.0 as usize].grant = Some(grant);
        self.turn = Turn::Worker(worker);
        if self
            .last_worker
            .replace(worker)
            .is_some_and(|last| last != worker)
        {
            self.step.switches += 1;
            self.total.switches += 1;
        }
        self.effects.push(super::Effect::WakeWorker(worker));
    }

    fn finish_task(&mut self, worker: WorkerId, task: &CurrentTask, now: Duration) {
        if !matches!(self.stage, Stage::Running | Stage::Ending) {
            return;
        }
        match task.request {
            None if task.kind == TraceKind::WeightGradient => {}
            None => {
                self.progress.returned += 1;
                self.returned.insert(task.microbatch);
                if let Some(order) = &mut self.order {
                    order.root_returns(task.microbatch);
                }
                if !task.reached_backward {
                    self.progress.forwards_done += 1;
                }
                self.root_is_past_forward(task.microbatch);
            }
            Some(key) if self.serving.contains_key(&key) => {
                let (requester, id) = key;
                let message = format!(
                    "worker {worker} ended the task of request {id} of rank {requester} without an answer"
                );
                let failure =
                    self.own_failure(FailureKind::Remote, "ServerError", message, Some(task));
                self.fail_with(Failure { ..failure }, true, now);
            }
            Some(_) => {}
        }
    }

    /// A worker has computed a checkpointed module again since `start`.
    pub fn recomputed(&mut self, worker: WorkerId, start: Duration, now: Duration) {
        let slot = self.workers.get(worker.0 as usize);
        if let Some(task) = slot.and_then(|slot| slot.task) {
            self.record_task(worker, TraceKind::Recompute, &task, start, now);
        }
    }

    pub(super) fn record_task(
        &mut self,
        worker: WorkerId,
        kind: TraceKind,
        task: &CurrentTask,
        start: Duration,
        end: Duration,
    ) {
        self.trace.push(TraceRecord {
            step: self.plan.step,
            kind,
            worker: Some(worker),
            phase: Some(task.phase),
            model: task.model,
            module: task.module,
            microbatch: Some(task.microbatch),
            peer: task.request.map(|(requester, _)| requester),
            request: task.request.map(|(_, id)| id),
            bytes: 0,
            start,
            end,
        });
    }
}
