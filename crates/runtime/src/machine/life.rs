//! A step's life: begin, end, commit.

use std::num::NonZeroU32;
use std::time::Duration;

use shardwright_core::{MicrobatchId, Rank, StepEpoch};
use shardwright_schedule::{Progress, ReadyKind, Schedule, Turns};
use shardwright_wire::{Body, Message, StepBegin, StepEnd};

use super::dispatch::{Subject, Turn};
use super::{Effect, Machine, Stage, StepPlan};
use crate::counters::TaskCounters;
use crate::failure::{Failure, ServerError};

impl Machine {
    /// Enters a step. The root tells its peers; they compare with what they were called with.
    ///
    /// An error of kind [`ServerError::Failed`] means that the step has failed already: it was
    /// aborted elsewhere, or a rank that it needs has left.
    pub fn begin_step(&mut self, plan: StepPlan, now: Duration) -> Result<(), ServerError> {
        if self.in_step() {
            return Err(self.in_step_error("begin_step"));
        }
        self.enter_step(plan, now)?;
        self.account.begin(now);
        self.stage = Stage::Running;
        if self.is_root() {
            self.open_root();
        }
        self.take_kept(now);
        self.dispatch(None, now);
        Ok(())
    }

    /// Enters a step that has no tasks here, because the pipeline has one rank and the main
    /// thread runs the step function itself: what remains is to fail together with the job.
    pub fn begin_alone(
        &mut self,
        step: StepEpoch,
        function: String,
        now: Duration,
    ) -> Result<(), ServerError> {
        if self.in_step() {
            return Err(self.in_step_error("begin_alone"));
        }
        let schedule = self.plan.schedule.clone();
        self.enter_step(
            StepPlan {
                step,
                function,
                num_microbatches: 1,
                one_at_a_time: false,
                schedule,
            },
            now,
        )?;
        self.stage = Stage::Committing;
        Ok(())
    }

    /// Lets the microbatches of the step that runs start one after another from now on, whatever its schedule.
    pub fn one_at_a_time(&mut self) {
        self.plan.one_at_a_time = true;
        self.plan.schedule = Schedule::one_at_a_time();
        self.order = None;
    }

    /// Whether they do so for the sake of what modules keep, whatever the schedule.
    pub fn keeps_one_at_a_time(&self) -> bool {
        self.plan.one_at_a_time
    }

    /// Whether the microbatches of the step that runs start one after another.
    pub fn runs_one_at_a_time(&self) -> bool {
        self.plan.one_at_a_time
            || self.plan.schedule.active() == Some(NonZeroU32::MIN)
            || self.plan.num_microbatches == 1
    }

    fn enter_step(&mut self, plan: StepPlan, now: Duration) -> Result<(), ServerError> {
        if plan.step <= self.plan.step {
            return Err(ServerError::StaleStep {
                asked: plan.step,
                newest: self.plan.step,
            });
        }
        if plan.num_microbatches == 0 {
            return Err(ServerError::NoMicrobatches { step: plan.step });
        }
        self.forget_step();
        self.beside = None;
        self.main_blocked = false;
        self.plan = plan;
        self.plan.one_at_a_time &= self.is_root(); // the root says so in its StepBegin
        if self.plan.one_at_a_time {
            self.one_at_a_time();
        }
        self.begin_order();
        self.begin_peer_order();
        self.begin_stays();
        self.num_deferred = 0;
        self.turns = Turns::of(&self.plan.schedule);
        self.begun = self.is_root();
        self.progress = Progress::default();
        self.step = TaskCounters::default();
        self.stats.steps += 1;
        self.stall.begin(now);
        if let Some(report) = self.kept.take_abort(self.plan.step) {
            self.late = None;
            return Err(self.fail_at_entry(Failure::remote(report), false));
        }
        if let Some(failure) = self.late.take().or_else(|| self.departed_at_entry()) {
            return Err(self.fail_at_entry(failure, true));
        }
        Ok(())
    }

    fn open_root(&mut self) {
        self.progress.num_microbatches = self.plan.num_microbatches;
        for to in self.pipeline_peers() {
            let begin = StepBegin {
                step: self.plan.step,
                function: self.plan.function.clone(),
                num_microbatches: self.plan.num_microbatches,
                one_at_a_time: self.plan.one_at_a_time,
            };
            self.effects.push(Effect::Send {
                to,
                message: Message::StepBegin(begin),
            });
        }
        for microbatch in 0..self.plan.num_microbatches {
            self.push_ready(
                ReadyKind::RootForward,
                MicrobatchId(microbatch),
                Subject::Root,
            );
        }
    }

    /// The root has the step's result: its peers' part ends, and the commit begins.
    pub fn end_step(&mut self, body: Body) -> Result<(), ServerError> {
        if !self.is_root() {
            return Err(ServerError::NotRoot {
                call: "end_step",
                rank: self.config.rank,
            });
        }
        self.require_running("end_step")?;
        if self.stage != Stage::Ending {
            return Err(self.in_step_error("end_step"));
        }
        self.stage = Stage::Committing;
        let step = self.plan.step;
        let peers = self.pipeline_peers();
        let mut body = Some(body);
        for (index, to) in peers.iter().enumerate() {
            // The tensors are shared; the last peer's message takes the tree itself.
            let copy = if index + 1 == peers.len() {
                body.take()
            } else {
                body.clone()
            };
            let body = copy.expect("taken only for the last peer");
            self.effects.push(Effect::Send {
                to: *to,
                message: Message::StepEnd(Box::new(StepEnd { step, body })),
            });
        }
        Ok(())
    }

    /// The commit is done; between steps again.
    pub fn leave_step(&mut self, now: Duration) -> Result<(), ServerError> {
        match &self.stage {
            Stage::Committing => {
                let num_ranks = self.config.pipeline.len() as u32;
                let plan = &self.plan;
                let ideal = plan.schedule.ideal_bubble(num_ranks, plan.num_microbatches);
                self.account.end(ideal, now);
                self.outstanding.clear();
                self.forget_held();
                self.stage = Stage::Outside;
                Ok(())
            }
            // The commit was done when the failure arrived: it is the next step's to report.
            Stage::Aborting(failure) if self.all_quiet() => {
                self.late.get_or_insert(failure.clone());
                self.stage = Stage::Outside;
                Ok(())
            }
            Stage::Failed(_) => Ok(()),
            Stage::Outside => Err(ServerError::NotInStep { call: "leave_step" }),
            Stage::Running | Stage::Ending | Stage::Aborting(_) => {
                Err(self.in_step_error("leave_step"))
            }
        }
    }

    /// Raises the failure of a step whose tasks are over; for those who wait in a collective of
    /// `needed` ranks. A rank that has left in good order fails it only after a while, since it
    /// may have left because its own part was done. Of a step not entered yet it raises, without
    /// entering it, what would fail it at its entry.
    pub fn check_abort(
        &mut self,
        step: StepEpoch,
        needed: &[Rank],
        now: Duration,
    ) -> Result<(), ServerError> {
        if matches!(
            self.stage,
            Stage::Running | Stage::Ending | Stage::Committing
        ) && step == self.plan.step
            && let Some(failure) = self.departed_from_collective(needed, now)
        {
            self.fail_with(failure, true, now);
        }
        if step > self.plan.step {
            let failure = self
                .kept
                .abort_of(step)
                .map(Failure::remote)
                .or_else(|| self.departed_from_collective(needed, now));
            return failure.map_or(Ok(()), |failure| {
                Err(ServerError::Failed(Box::new(failure)))
            });
        }
        match &self.stage {
            Stage::Aborting(failure) if step == self.plan.step => {
                if !self.all_quiet() {
                    return Err(ServerError::Aborted);
                }
                let failure = failure.clone();
                self.finish_failing(failure.clone());
                Err(ServerError::Failed(Box::new(failure)))
            }
            Stage::Failed(failure) if step == self.plan.step => {
                Err(ServerError::Failed(Box::new(failure.clone())))
            }
            _ => Ok(()),
        }
    }

    /// Whether nothing is left to unwind of a step that fails, which is then over.
    ///
    /// Needed before the next step by a main thread that did not supervise the failed one to
    /// its end, because it raised itself.
    pub fn unwound(&mut self, now: Duration) -> bool {
        let Stage::Aborting(failure) = &self.stage else {
            return true;
        };
        if self.turn == Turn::Main {
            self.turn = Turn::Free;
        }
        if self.all_quiet() {
            let failure = failure.clone();
            self.finish_failing(failure);
            return true;
        }
        self.dispatch(None, now);
        false
    }

    /// Whether no stack and no request of the step is left on this rank (EX-7).
    pub(super) fn all_quiet(&self) -> bool {
        self.turn != Turn::Main && self.workers_idle()
    }

    pub(super) fn workers_idle(&self) -> bool {
        self.busy_workers == 0
    }

    pub(super) fn in_step_error(&self, call: &'static str) -> ServerError {
        ServerError::InStep {
            call,
            step: self.plan.step,
            function: self.plan.function.clone(),
        }
    }
}
