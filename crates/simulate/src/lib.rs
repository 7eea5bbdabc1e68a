//! How long a pipeline's step takes, and who idles when: a simulation of schedules on given costs.
//! Pure: no clock, no I/O, no threads, and the same numbers each time.
//!
//! Two kinds of schedule are simulated. A [`Program`](shardwright_schedule::Program) is run as it
//! says: [`simulate_program`]. A policy ([`Schedule`](shardwright_schedule::Schedule)) decides as
//! it does in the execution server, from what is ready whenever a rank is free:
//! [`simulate_schedule`]. What is assumed of ranks and transfers: `docs/design/schedules.md`.
//!
//! ```
//! use std::num::NonZeroU32;
//! use std::time::Duration;
//!
//! use shardwright_schedule::{Reference, Shape};
//! use shardwright_simulate::{StepCosts, Latency, StageCosts, simulate_program};
//!
//! let shape = Shape {
//!     num_ranks: NonZeroU32::new(4).unwrap(),
//!     num_microbatches: NonZeroU32::new(8).unwrap(),
//!     stages_per_rank: NonZeroU32::MIN,
//! };
//! let millisecond = Duration::from_millis(1);
//! let costs = StepCosts::Same(vec![StageCosts::split(millisecond, millisecond, millisecond); 4]);
//! let makespan = |reference: Reference| {
//!     let program = reference.program(shape).expect("one stage per rank is always defined");
//!     simulate_program(&program, &costs, &Latency::NONE).map(|outcome| outcome.makespan)
//! };
//! assert_eq!(makespan(Reference::Interleaved), Ok(33 * millisecond));
//! assert_eq!(makespan(Reference::ZeroBubble), Ok(27 * millisecond));
//! ```

mod auto;
mod costs;
mod error;
mod in_flight;
mod outcome;
mod policy;
mod program;
mod route;
mod tuning;

#[cfg(test)]
mod tests;

pub use auto::{MARGIN, RankTimes, ScheduleChoice, StepTimes, Trial, choose_schedule};
pub use costs::{Latency, StageCosts, StepCosts};
pub use error::SimulationError;
pub use in_flight::{expected_order, in_flight};
pub use outcome::{RankUse, SimulatedStep, TaskKind, TaskSpan};
pub use policy::{simulate_schedule, simulate_splits};
pub use program::simulate_program;
pub use route::{Chain, Control};
pub use tuning::{Measured, Plan, RankLoad, StepLoad, Tuned, latency_of, tune};
