//! Where a microbatch's backward begins, and what of a backward is left for later.

use std::time::Duration;

use shardwright_core::{MicrobatchId, WorkerId};
use shardwright_schedule::ReadyKind;

use super::Machine;
use super::dispatch::{Deferred, Subject};
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
    pub fn begin_backward_elsewhere(&mut self, worker: WorkerId) -> Result<bool, ServerError> {
        let microbatch = self.reaches_backward(worker, "begin_backward_elsewhere")?;
        if let Some(order) = &self.order {
            // What the program does not name, it does not hold back; who runs the backward has its own part of the program.
            return Ok(order
                .root_unit(ReadyKind::RootBackward, microbatch)
                .is_none());
        }
        let schedule = &self.plan.schedule;
        Ok(schedule.may_begin_elsewhere(microbatch, &self.progress()))
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

    /// The backward that a worker runs leaves its weight gradients for later, under a name that
    /// Python knows them by: a task of this rank's own, for a time when nobody waits for another.
    pub fn defer_weight_gradient(
        &mut self,
        worker: WorkerId,
        token: u64,
    ) -> Result<(), ServerError> {
        self.require_running("defer_weight_gradient")?;
        self.require_turn(worker, "defer_weight_gradient")?;
        let Some(task) = self.workers[worker.0 as usize].task else {
            return Err(ServerError::NotExecuting {
                worker,
                call: "defer_weight_gradient",
            });
        };
        let deferred = Deferred {
            token,
            model: task.model,
            module: task.module,
            microbatch: task.microbatch,
        };
        if let Some(order) = &mut self.order {
            order.leaves_weights(token, task.microbatch, task.request);
        }
        self.push_ready(
            ReadyKind::WeightGradient,
            task.microbatch,
            Subject::WeightGradient(deferred),
        );
        Ok(())
    }
}
