//! A measured forward, and the step that a refinement makes fast.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use shardwright_core::ModuleId;
use shardwright_schedule::Schedule;

use crate::PartitionError;
use crate::request::not_allowed;

/// Far more than any forward takes, and far less than what durations can hold.
const MOST_SECONDS: f64 = 1e6;

/// A module's forward within the measured one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Execution {
    /// The module; the root for the code outside the model.
    pub module: ModuleId,
    /// The execution that called it, which comes earlier; `None` for the first, the code outside.
    pub caller: Option<u32>,
    /// Bytes of the tensors that it was called with.
    pub argument_bytes: u64,
    /// Bytes of the tensors that it returned.
    pub result_bytes: u64,
}

/// A stretch of time in which one module ran, and none that it calls.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleInterval {
    /// The execution that ran.
    pub execution: u32,
    /// How long, in seconds.
    pub seconds: f64,
}

/// A measured forward of one microbatch, and the schedule that its steps will follow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The schedule, such as `interleaved(active=4)`.
    pub schedule: String,
    /// Microbatches of a step.
    pub num_microbatches: NonZeroU32,
    /// Executions in the order of their starts.
    pub executions: Vec<Execution>,
    /// What ran one after another. Two that follow one another belong to one execution, or to one
    /// and its caller.
    pub pieces: Vec<ModuleInterval>,
    /// Modules that must not be divided, or microbatches would have to run one after another.
    #[serde(default)]
    pub undivided: Vec<ModuleId>,
}

impl Measured {
    pub(crate) fn check(&self, num_modules: usize) -> Result<(), PartitionError> {
        self.schedule()?;
        let module_exists = |module: ModuleId| (module.0 as usize) < num_modules;
        for (number, execution) in self.executions.iter().enumerate() {
            let caller_is_earlier = match execution.caller {
                None => number == 0,
                Some(caller) => (caller as usize) < number,
            };
            if !module_exists(execution.module) || !caller_is_earlier {
                return Err(not_allowed(
                    format!("execution {number}"),
                    format!("{execution:?}"),
                    "a module of the model, and a caller that comes earlier",
                ));
            }
        }
        for module in &self.undivided {
            if !module_exists(*module) {
                let allowed = format!("numbers below {num_modules}");
                return Err(not_allowed("a module's number", module, allowed));
            }
        }
        let mut before: Option<u32> = None;
        for (number, piece) in self.pieces.iter().enumerate() {
            let follows = before.is_none_or(|before| self.are_neighbours(before, piece.execution));
            let exists = (piece.execution as usize) < self.executions.len();
            if !exists || !follows || !(0.0..=MOST_SECONDS).contains(&piece.seconds) {
                return Err(not_allowed(
                    format!("piece {number}"),
                    format!("{piece:?}"),
                    "0 to 1000000 seconds of an execution that calls the one before, or is called by it",
                ));
            }
            before = Some(piece.execution);
        }
        Ok(())
    }

    fn are_neighbours(&self, first: u32, second: u32) -> bool {
        let calls = |caller: u32, callee: u32| {
            let callee = self.executions.get(callee as usize);
            callee.is_some_and(|callee| callee.caller == Some(caller))
        };
        first == second || calls(first, second) || calls(second, first)
    }

    pub(crate) fn schedule(&self) -> Result<Schedule, PartitionError> {
        self.schedule.parse().map_err(|_| {
            not_allowed(
                "schedule",
                &self.schedule,
                "simple, interleaved(active=N), looped(active=N) and zero_bubble(active=N)",
            )
        })
    }
}
