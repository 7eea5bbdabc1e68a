//! How a step fails on this rank, and how the others learn of it (EX-5, EX-6, EX-9).

use std::collections::BTreeSet;
use std::time::Duration;

use shardwright_core::{Rank, StepEpoch};
use shardwright_wire::{Abort, ErrorReport, Message};

use super::dispatch::{Start, Turn};
use super::tasks::CurrentTask;
use super::{Effect, Machine, Stage};
use crate::failure::{Failure, FailureKind, LocalError, ServerError, Strength};

/// Ranks run in lockstep, so an abort for a step older than this many cannot be under way.
const REMEMBERED_FAILED_STEPS: usize = 16;

/// The newest steps that failed here: further reports of their failure mean nothing new.
#[derive(Debug, Default)]
pub(super) struct FailedSteps(BTreeSet<StepEpoch>);

impl FailedSteps {
    fn insert(&mut self, step: StepEpoch) {
        self.0.insert(step);
        if self.0.len() > REMEMBERED_FAILED_STEPS {
            self.0.pop_first();
        }
    }

    pub(super) fn contains(&self, step: StepEpoch) -> bool {
        self.0.contains(&step)
    }
}

impl Machine {
    /// This rank's own code raised: the step fails everywhere. The first failure wins.
    ///
    /// A `step` that this rank has not entered is failed before it begins: the others, which
    /// may wait in it already, learn so. Outside a step, without a newer one, nothing happens.
    pub fn fail(&mut self, step: Option<StepEpoch>, error: LocalError, now: Duration) {
        let (rank, host) = error
            .origin
            .unwrap_or_else(|| (self.config.rank, self.host(self.config.rank)));
        let report = ErrorReport {
            rank,
            host,
            module: error.module,
            microbatch: error.microbatch,
            phase: error.phase,
            kind: error.kind,
            message: error.message,
            traceback: error.traceback,
        };
        let failure = Failure {
            kind: FailureKind::Local,
            report,
        };
        match step {
            Some(step) if !self.in_step() && step > self.plan.step => {
                self.plan.step = step;
                self.beside = None;
                self.stats.steps += 1;
                // What made this rank raise may be a failure that all ranks know already.
                match self.kept.abort_of(step).map(Failure::remote) {
                    Some(known) => self.fail_at_entry(known, false),
                    None => self.fail_at_entry(failure, true),
                };
            }
            // An earlier failed step still unwinds here.
            Some(step) if matches!(self.stage, Stage::Aborting(_)) && step > self.plan.step => {
                self.failed_steps.insert(step);
                if self.kept.abort_of(step).is_none() {
                    self.broadcast_abort(step, &failure.report);
                }
            }
            _ => self.fail_with(failure, true, now),
        }
    }

    /// A message could not be handed to the transport for a reason other than a lost peer.
    pub fn send_failed(&mut self, to: Rank, reason: &str, now: Duration) {
        if self.in_step() {
            let message = format!("a message for rank {to} could not be sent: {reason}");
            let failure = self.own_failure(FailureKind::Remote, "CommError", message, None);
            self.fail_with(failure, true, now);
        }
    }

    /// This rank's server does not work as it should.
    pub fn fail_internally(&mut self, reason: String, now: Duration) {
        let failure = self.own_failure(FailureKind::Remote, "ServerError", reason, None);
        self.fail_with(failure, true, now);
    }

    /// Ends the step in failure. `broadcast` when this rank is the one that found out.
    pub(super) fn fail_with(&mut self, failure: Failure, broadcast: bool, now: Duration) {
        match self.stage {
            Stage::Running | Stage::Ending | Stage::Committing => {}
            // The first failure of a step wins; between steps there is nothing to end.
            Stage::Aborting(_) | Stage::Failed(_) | Stage::Outside => return,
        }
        if broadcast {
            self.broadcast_abort(self.plan.step, &failure.report);
        }
        self.account.abandon();
        self.stall.progress(now);
        if self.stage == Stage::Committing && failure.kind == FailureKind::Local {
            // No stack is left to unwind, and Python raises its own exception.
            self.finish_failing(failure);
            return;
        }
        self.stage = Stage::Aborting(failure);
        self.dispatch(None, now);
    }

    /// Another rank has a reason of its own for the end of a step that has failed here. The strongest is remembered.
    pub(super) fn hear_beside(&mut self, failure: Failure) {
        let heard = self.beside.as_ref().map(Failure::strength);
        if heard < Some(failure.strength()) {
            self.beside = Some(failure);
        }
    }

    /// Whether the step that has failed here would be run again for this rank's own reason; `departures` if steps that
    /// depart from what was predicted are.
    pub fn would_run_again(&self, step: StepEpoch, departures: bool) -> bool {
        match &self.stage {
            Stage::Aborting(failure) | Stage::Failed(failure) if step == self.plan.step => {
                failure.strength() < strength_that_ends(departures)
            }
            _ => false,
        }
    }

    /// Raises what another rank has heard of a step that would be run again for this rank's own reason, if it ends the
    /// step there. All ranks run a step again, or none: who has such a reason has told everyone.
    pub fn check_run_again(&self, step: StepEpoch, departures: bool) -> Result<(), ServerError> {
        match &self.beside {
            Some(failure)
                if step == self.plan.step
                    && failure.strength() >= strength_that_ends(departures) =>
            {
                Err(ServerError::Failed(Box::new(failure.clone())))
            }
            _ => Ok(()),
        }
    }

    /// A failure of a step that had succeeded here.
    pub(super) fn fail_late(&mut self, failure: Failure, now: Duration) {
        if self.in_step() {
            self.fail_with(failure, true, now);
        } else if self.late.is_none() {
            self.late = Some(failure);
        }
    }

    /// The step that is being entered fails before it has begun.
    pub(super) fn fail_at_entry(&mut self, failure: Failure, broadcast: bool) -> ServerError {
        self.kept.take_abort(self.plan.step);
        if broadcast {
            self.broadcast_abort(self.plan.step, &failure.report);
        }
        self.finish_failing(failure.clone());
        ServerError::Failed(Box::new(failure))
    }

    /// All stacks are gone: forgets the step (EX-9).
    pub(super) fn finish_failing(&mut self, failure: Failure) {
        self.failed_steps.insert(self.plan.step);
        self.stats.steps_failed += 1;
        self.stage = Stage::Failed(failure);
        self.forget_step();
    }

    /// Drops everything that belongs to one step.
    pub(super) fn forget_step(&mut self) {
        self.account.abandon();
        self.ready.clear();
        self.outstanding.clear();
        self.serving.clear();
        self.forget_held();
        self.controls.clear();
        self.end_body = None;
        self.main_missing = None;
        self.start = Start::NotWanted;
        if self.turn == Turn::Main {
            self.turn = Turn::Free;
        }
    }

    /// A report by this rank about itself, naming the task where there is one.
    pub(super) fn own_failure(
        &self,
        kind: FailureKind,
        name: &str,
        message: String,
        task: Option<&CurrentTask>,
    ) -> Failure {
        let report = ErrorReport {
            rank: self.config.rank,
            host: self.host(self.config.rank),
            module: task.and_then(|task| Some(self.module_name(task.model?, task.module?))),
            microbatch: task.map(|task| task.microbatch),
            phase: task.map(|task| task.phase),
            kind: name.to_owned(),
            message,
            traceback: String::new(),
        };
        Failure { kind, report }
    }

    fn broadcast_abort(&mut self, step: StepEpoch, report: &ErrorReport) {
        for rank in 0..self.config.hosts.len() as u32 {
            let to = Rank(rank);
            if to != self.config.rank && !self.peers.is_lost(to) {
                let abort = Abort {
                    step,
                    error: report.clone(),
                };
                self.effects.push(Effect::Send {
                    to,
                    message: Message::Abort(Box::new(abort)),
                });
            }
        }
    }
}

fn strength_that_ends(departures: bool) -> Strength {
    if departures {
        Strength::Final
    } else {
        Strength::Departure
    }
}
