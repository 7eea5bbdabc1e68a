//! Where a microbatch's backward begins, and what of a backward is left for later.

use std::time::Duration;

use shardwright_core::{MicrobatchId, WorkerId};
use shardwright_schedule::ReadyKind;
use shardwright_wire::Phase;

use super::Machine;
use super::dispatch::{Deferred, Subject};
use super::tasks::CurrentTask;
use super::workers::WorkerState;
use crate::failure::ServerError;
use crate::trace::TraceKind;

impl Machine {
    /// A root task has reached `model.backward`: it waits for the schedule's grant.
    pub fn await_backward(&mut self, worker: WorkerId, now: Duration) -> Result<(), ServerError> {
        let microbatch = self.reaches_backward(worker, "await_backward")?;
        self.push_ready(ReadyKind::RootBackward, microbatch, Subject::Worker(worker));
        self.suspend(worker, WorkerState::AwaitsBackward, now);
        Ok(())
    }

    /// A root task has reached `model.backward`, which begins on another rank: whether it may ask for that
    /// at once, without [`Machine::await_backward`].
    pub fn begin_backward_elsewhere(
        &mut self,
        worker: WorkerId,
        now: Duration,
    ) -> Result<bool, ServerError> {
        let microbatch = self.reaches_backward(worker, "begin_backward_elsewhere")?;
        let may = if let Some(order) = &self.order {
            // What the program does not name, it does not hold back; who runs the backward has its own part of the program.
            order
                .root_unit(ReadyKind::RootBackward, microbatch)
                .is_none()
        } else {
            let schedule = &self.plan.schedule;
            schedule.may_begin_elsewhere(microbatch, &self.progress())
        };
        if may {
            self.goes_on_with_backward(worker, now);
        }
        Ok(may)
    }

    /// Records what a task has done so far; what it does from now on is backward work.
    fn goes_on_with_backward(&mut self, worker: WorkerId, now: Duration) {
        let slot = &mut self.workers[worker.0 as usize];
        let Some(task) = slot.task else {
            return;
        };
        let start = std::mem::replace(&mut slot.since, now);
        slot.task = Some(CurrentTask {
            phase: Phase::Backward,
            ..task
        });
        self.account.ran(&task, now);
        self.record_task(worker, task.kind, &task, start, now);
    }

    fn reaches_backward(
        &mut self,
        worker: WorkerId,
        call: &'static str,
    ) -> Result<MicrobatchId, ServerError> {
        self.require_running(call)?;
        self.require_turn(worker, call)?;
        let task = self.workers[worker.0 as usize].task.as_mut();
        let Some(task) = task.filter(|task| task.kind == TraceKind::Root) else {
            return Err(ServerError::NotARootTask { worker });
        };
        let microbatch = task.microbatch;
        if !std::mem::replace(&mut task.reached_backward, true) {
            self.progress.forwards_done += 1;
        }
        self.root_is_past_forward(microbatch);
        if let Some(order) = &mut self.order {
            order.root_reaches_backward(microbatch);
        }
        Ok(microbatch)
    }

    /// The backward that a worker runs leaves its weight gradients for later: a task of this rank's own, for a time when
    /// nobody waits for another. Returns the token of that task. Tokens count from 0 in each step, so that on all ranks
    /// of a tensor-parallel group they name the same, whatever a failed step had left on each.
    pub fn defer_weight_gradient(&mut self, worker: WorkerId) -> Result<u64, ServerError> {
        self.require_running("defer_weight_gradient")?;
        self.require_turn(worker, "defer_weight_gradient")?;
        let Some(task) = self.workers[worker.0 as usize].task else {
            return Err(ServerError::NotExecuting {
                worker,
                call: "defer_weight_gradient",
            });
        };
        let token = self.num_deferred;
        self.num_deferred += 1;
        let deferred = Deferred {
            token,
            model: task.model,
            module: task.module,
            microbatch: task.microbatch,
        };
        if let Some(order) = &mut self.order {
            order.leaves_weights(token, task.microbatch, task.request);
        }
        let subject = Subject::WeightGradient(deferred);
        self.tell_deferred(self.name_of(&subject, task.microbatch));
        self.push_ready(ReadyKind::WeightGradient, task.microbatch, subject);
        Ok(token)
    }
}
