//! Handing over the turn: what is ready, and who runs it.

use std::collections::BTreeSet;
use std::time::Duration;

use shardwright_core::{MicrobatchId, ModelId, ModuleId, WorkerId};
use shardwright_schedule::{Progress, Ready, ReadyKind};
use shardwright_wire::Request;

use super::tasks::Task;
use super::workers::{Grant, WorkerSlot, WorkerState};
use super::{Effect, Machine, Stage};
use crate::failure::FailureKind;
use crate::trace::TraceKind;

/// Who computes on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nobody.
    Free,
    /// A worker.
    Worker(WorkerId),
    /// The main thread, in a control request.
    Main,
}

/// Whether a worker is being started (EX-2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// No.
    NotWanted,
    /// The main thread is to start one.
    Wanted,
    /// The main thread has been told to start this one, which has not come up yet.
    UnderWay(WorkerId),
}

/// What a ready item would run.
#[derive(Debug)]
pub(super) enum Subject {
    /// A step function that has not started.
    Root,
    /// A request that has not started.
    Request(Box<Request>),
    /// A suspended worker.
    Worker(WorkerId),
    /// Weight gradients that a backward has left for later.
    WeightGradient(Deferred),
}

/// The weight gradients of one backward, which this rank computes when nobody waits for anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deferred {
    /// How many this rank had left before in the step; Python knows them by it.
    pub token: u64,
    /// The backward's model; `None` in the step function.
    pub model: Option<ModelId>,
    /// Its module; `None` in the step function.
    pub module: Option<ModuleId>,
    /// The microbatch.
    pub microbatch: MicrobatchId,
}

#[derive(Debug)]
pub(super) struct ReadyItem {
    pub(super) ready: Ready,
    pub(super) subject: Subject,
}

impl Machine {
    pub(super) fn push_ready(
        &mut self,
        kind: ReadyKind,
        microbatch: MicrobatchId,
        subject: Subject,
    ) {
        self.arrivals += 1;
        let ready = Ready {
            kind,
            microbatch,
            arrival: self.arrivals,
            visit: self.turns.visit(kind, microbatch),
        };
        self.ready.push(ReadyItem { ready, subject });
    }

    /// How far the microbatches are, now.
    pub(super) fn progress(&self) -> Progress {
        let deferred: BTreeSet<_> = self
            .ready
            .iter()
            .filter(|item| matches!(item.subject, Subject::WeightGradient(_)))
            .map(|item| item.ready.microbatch)
            .filter(|microbatch| !self.in_flight(*microbatch))
            .collect();
        Progress {
            deferred: deferred.len() as u32,
            listed: self.listed(&self.progress),
            after_backward: self.turns.last_was_backward(),
            ..self.progress
        }
    }

    /// Whether the step function of a microbatch runs, or is suspended, on this rank.
    fn in_flight(&self, microbatch: MicrobatchId) -> bool {
        let tasks = self.workers.iter().filter_map(|worker| worker.task);
        tasks
            .filter(|task| task.kind == TraceKind::Root)
            .any(|task| task.microbatch == microbatch)
    }

    /// Gives the turn away if it is free. `asking` is a worker that has just become IDLE and
    /// so runs a fresh task without a change of threads (EX-3).
    pub(super) fn dispatch(&mut self, asking: Option<WorkerId>, now: Duration) {
        if self.turn == Turn::Free && !self.closed {
            match self.stage {
                Stage::Running | Stage::Ending => self.dispatch_ready(asking, now),
                Stage::Aborting(_) => self.dispatch_unwinding(now),
                Stage::Outside | Stage::Committing | Stage::Failed(_) => {}
            }
        }
        if self.main_has_work() {
            self.effects.push(Effect::WakeMain);
        }
    }

    fn dispatch_ready(&mut self, asking: Option<WorkerId>, now: Duration) {
        if !self.controls.is_empty() {
            // Tasks that were sent after a control request may rely on it.
            return;
        }
        let Some(index) = self.choose() else {
            self.check_fit(now);
            self.check_deadlock(now);
            return;
        };
        if self.leader().is_some() && !self.check_told(index, now) {
            return;
        }
        self.account.idled(self.receiving_from, now);
        if let Subject::Worker(worker) = self.ready[index].subject {
            self.follows(index);
            self.ready.swap_remove(index);
            self.grant(worker, Grant::Resume, now);
            return;
        }
        let Some(worker) = asking.or_else(|| self.first_idle()) else {
            // EX-2: the start is asked for once, and only because nobody is idle.
            if self.start == Start::NotWanted {
                self.start = Start::Wanted;
            }
            return;
        };
        if self.start == Start::Wanted {
            self.start = Start::NotWanted;
        }
        self.follows(index);
        let item = self.ready.swap_remove(index);
        let task = match item.subject {
            Subject::Root => {
                self.progress.started += 1;
                Task::Root {
                    microbatch: item.ready.microbatch,
                }
            }
            Subject::Request(request) => {
                self.parked.begins(&request);
                Task::Request(request)
            }
            Subject::WeightGradient(deferred) => Task::WeightGradient(deferred),
            Subject::Worker(_) => unreachable!("a suspended worker was resumed above"),
        };
        self.grant(worker, Grant::Task(task), now);
    }

    /// EX-6: one suspended stack at a time.
    fn dispatch_unwinding(&mut self, now: Duration) {
        if let Some(index) = self.workers.iter().position(WorkerSlot::is_pending) {
            self.grant(WorkerId(index as u32), Grant::Aborted, now);
        }
    }

    pub(super) fn first_idle(&self) -> Option<WorkerId> {
        let index = self
            .workers
            .iter()
            .position(|worker| worker.state == WorkerState::Idle && worker.grant.is_none())?;
        Some(WorkerId(index as u32))
    }

    /// A root whose tasks all wait, with no request under way, waits for ever.
    fn check_deadlock(&mut self, now: Duration) {
        let unfinished = self.progress.returned < self.progress.num_microbatches;
        if self.is_root()
            && self.leader().is_none()
            && self.stage == Stage::Running
            && unfinished
            && self
                .outstanding
                .values()
                .all(|request| request.response.is_some())
            && self.serving.is_empty()
            && !matches!(self.start, Start::UnderWay(_))
        {
            let message = format!(
                "{} is deadlocked: no task runs or may run under {}, and no request is under way; {}{}",
                self.step_text(),
                self.plan.schedule.summary(),
                self.waits_text(now),
                self.order_text(),
            );
            let failure = self.own_failure(FailureKind::Stall, "StallError", message, None);
            self.fail_with(failure, true, now);
        }
    }
}
