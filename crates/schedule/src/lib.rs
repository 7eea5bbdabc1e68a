//! Which ready task runs next: the pipeline schedules, as values. Pure.
//!
//! A rank collects what could run now as [`Ready`] items; a [`Schedule`] picks one of them or
//! none. The same policy serves every rank of a pipeline: ranks other than the root simply
//! never have root items.
//!
//! ```
//! use shardwright_core::MicrobatchId;
//! use shardwright_schedule::{Ready, ReadyKind, RootProgress, Schedule};
//!
//! let schedule: Schedule = "interleaved(active=2)".parse()?;
//! let ready = [
//!     Ready { kind: ReadyKind::RequestForward, microbatch: MicrobatchId(0), arrival: 0 },
//!     Ready { kind: ReadyKind::RequestBackward, microbatch: MicrobatchId(1), arrival: 1 },
//! ];
//! let chosen = schedule.choose(&ready, &RootProgress::default());
//! assert_eq!(chosen, Some(1)); // a ready backward goes first
//! # Ok::<(), shardwright_schedule::ParseScheduleError>(())
//! ```

mod policy;
mod ready;

#[cfg(test)]
mod tests;

pub use policy::{ParseScheduleError, Schedule};
pub use ready::{Ready, ReadyKind, RootProgress};
