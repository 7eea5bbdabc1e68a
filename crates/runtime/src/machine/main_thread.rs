//! What the main thread sees while it supervises a step.

use std::time::Duration;

use shardwright_core::{RequestId, WorkerId};
use shardwright_wire::{Body, Request};

use super::dispatch::{Start, Turn};
use super::workers::{Waiting, WorkerSlot};
use super::{Machine, Stage};
use crate::failure::{Failure, ServerError};

/// Something for the main thread.
#[derive(Clone, Debug, PartialEq)]
pub enum MainEvent {
    /// Start a thread that runs tasks as this worker.
    StartWorker(WorkerId),
    /// A control request; the main thread has the turn until it supervises again.
    Control(Box<Request>),
    /// The root has ended the step, with this result.
    StepEnd(Body),
    /// On the root: all step functions have returned.
    RootDone,
    /// Nothing has moved here for a while; who waits for whom.
    StallReport(String),
    /// The step has failed, and all workers are idle.
    Failed(Failure),
}

impl Machine {
    /// The main thread supervises again: a control request that it had is over.
    pub fn enter_main(&mut self, now: Duration) {
        if self.turn == Turn::Main {
            self.turn = Turn::Free;
            self.account.ran_on_main(now);
            self.stall.progress(now);
            self.dispatch(None, now);
        }
        self.main_blocked = true;
    }

    /// Says whether the main thread waits in the server (EX-8).
    pub fn block_main(&mut self, blocked: bool) {
        self.main_blocked = blocked;
    }

    /// The main thread waits for something outside the server, or no longer does. Returns for how
    /// long nothing in the job has made progress (EX-8), as far as this rank knows.
    pub fn wait_outside(&mut self, waits: bool, now: Duration) -> Duration {
        if self.main_blocked != waits {
            self.main_blocked = waits;
            self.stall.progress(now);
        }
        self.stall.quiet(now)
    }

    /// For how long nothing in the job has made progress (EX-8), as far as this rank knows.
    pub fn quiet(&self, now: Duration) -> Duration {
        self.stall.quiet(now)
    }

    /// While a step runs in which this rank has nothing to do: when it made progress last, and how long ago. What a
    /// program holds back has a report of its own. A thread that is to come up, or comes up, will do something.
    pub fn idle_in_step(&self, now: Duration) -> Option<(Duration, Duration)> {
        let idle = self.stage == Stage::Running
            && self.turn == Turn::Free
            && self.main_blocked
            && self.start == Start::NotWanted
            && !self.main_has_work()
            && self.first_held().is_none();
        let last = self.stall.last_here();
        idle.then(|| (last, now.saturating_sub(last)))
    }

    /// What the main thread has to do now.
    pub fn poll_main(&mut self, now: Duration) -> Option<MainEvent> {
        if let Stage::Aborting(failure) = &self.stage
            && self.all_quiet()
        {
            let failure = failure.clone();
            self.finish_failing(failure.clone());
            return Some(MainEvent::Failed(failure));
        }
        if let Stage::Failed(failure) = &self.stage {
            return Some(MainEvent::Failed(failure.clone()));
        }
        if self.must_start_worker() {
            return Some(MainEvent::StartWorker(self.start_worker(now)));
        }
        if self.turn == Turn::Free
            && self.stage == Stage::Running
            && let Some(request) = self.controls.pop_front()
        {
            self.turn = Turn::Main;
            self.account.idled(None, now);
            return Some(MainEvent::Control(request));
        }
        if self.step_is_over() {
            if self.is_root() {
                self.account.end_tasks(now);
                self.stage = Stage::Ending;
                return Some(MainEvent::RootDone);
            }
            if let Some(body) = self.end_body.take() {
                self.account.end_tasks(now);
                self.stage = Stage::Committing;
                return Some(MainEvent::StepEnd(body));
            }
        }
        self.stall.take_report().map(MainEvent::StallReport)
    }

    /// The main thread waits for responses to its own requests.
    pub fn main_waits(&mut self, requests: &[RequestId]) -> Result<Waiting, ServerError> {
        self.require_running("wait")?;
        let missing = self.watch_requests(requests, None)?;
        self.main_missing = (missing > 0).then_some(missing);
        Ok(if missing == 0 {
            Waiting::Over
        } else {
            Waiting::Suspended
        })
    }

    /// Whether the main thread's wait is over; an error when the step fails meanwhile.
    pub fn poll_main_wait(&mut self) -> Result<Waiting, ServerError> {
        self.require_running("wait")?;
        if self.closed {
            return Err(ServerError::Aborted);
        }
        if self.main_missing.is_none_or(|missing| missing == 0) {
            self.main_missing = None;
            return Ok(Waiting::Over);
        }
        Ok(Waiting::Suspended)
    }

    /// Whether waking the main thread has a point.
    pub(super) fn main_has_work(&self) -> bool {
        match &self.stage {
            Stage::Outside => false,
            Stage::Committing | Stage::Failed(_) => self.main_missing.is_some(),
            Stage::Aborting(_) => self.all_quiet() || self.main_missing.is_some(),
            Stage::Running | Stage::Ending => {
                self.must_start_worker()
                    || self.main_missing == Some(0)
                    || (self.turn == Turn::Free && !self.controls.is_empty())
                    || self.step_is_over()
                    || self.stall.has_report()
            }
        }
    }

    /// Whether the tasks of this step are over on this rank (EX-7).
    fn step_is_over(&self) -> bool {
        let said_so = if self.is_root() {
            self.progress.returned == self.plan.num_microbatches
        } else {
            self.end_body.is_some()
        };
        said_so
            && self.stage == Stage::Running
            && self.turn == Turn::Free
            && self.workers_idle()
            && self.serving.is_empty()
            && self.ready.is_empty()
            && self
                .outstanding
                .values()
                .all(|request| request.response.is_some())
    }

    /// EX-2: a worker that has become idle since the start was wanted makes it needless.
    fn must_start_worker(&self) -> bool {
        self.start == Start::Wanted && self.first_idle().is_none()
    }

    /// EX-2: an id for a new worker, whose thread the main thread starts.
    fn start_worker(&mut self, now: Duration) -> WorkerId {
        let id = WorkerId(self.workers.len() as u32);
        self.workers.push(WorkerSlot::starting(now));
        self.start = Start::UnderWay(id);
        self.stats.workers_started += 1;
        id
    }
}
