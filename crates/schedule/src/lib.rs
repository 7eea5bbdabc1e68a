//! Pipeline schedules, as values. Pure.
//!
//! There are two kinds. A [`Schedule`] is a policy: which ready task runs next. A [`Program`] is an
//! order that is known beforehand: for each rank its tasks, one after another.
//!
//! # Policies
//!
//! A rank collects what could run now as [`Ready`] items; a [`Schedule`] picks one of them or
//! none. A list ([`RootOrder`]) is a policy too: the root starts its tasks in that order. The same policy serves every rank of a pipeline: ranks other than the root simply
//! never have root items.
//!
//! ```
//! use shardwright_core::MicrobatchId;
//! use shardwright_schedule::{Progress, Ready, ReadyKind, Schedule};
//!
//! let schedule: Schedule = "interleaved(active=2)".parse()?;
//! let ready = [
//!     Ready { kind: ReadyKind::RequestForward, microbatch: MicrobatchId(0), arrival: 0, visit: 0 },
//!     Ready { kind: ReadyKind::RequestBackward, microbatch: MicrobatchId(1), arrival: 1, visit: 0 },
//! ];
//! let chosen = schedule.choose(&ready, &Progress::default());
//! assert_eq!(chosen, Some(1)); // a ready backward goes first
//! # Ok::<(), shardwright_schedule::ParseScheduleError>(())
//! ```
//!
//! # Programs
//!
//! ```
//! use shardwright_schedule::{Program, ProgramError};
//!
//! let program = Program::from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")?;
//! assert_eq!(program.validate(), Ok(()));
//!
//! let program = Program::from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")?;
//! let Err(ProgramError::Deadlock(deadlock)) = program.validate() else { panic!() };
//! assert_eq!(
//!     deadlock.to_string(),
//!     "the ranks wait for each other: rank 0 stands at 0B0, which needs 1B0 of rank 1, where 1F1 comes first; \
//!      rank 1 stands at 1F1, which needs 0F1 of rank 0, where 0B0 comes first"
//! );
//! # Ok::<(), shardwright_schedule::ParseProgramError>(())
//! ```

mod configured;
mod ideal;
mod list;
mod policy;
mod program;
mod rank_order;
mod ready;
mod turns;

#[cfg(test)]
mod tests;

pub use configured::configured;
pub use list::{ListError, RootOrder, RootStart};
pub use policy::{ParseScheduleError, Schedule};
pub use program::{
    Action, ActionKind, Complete, Deadlock, NotAnAction, ParseProgramError, ParseReferenceError,
    Program, ProgramError, Reference, ReferenceError, Shape, Wait,
};
pub use rank_order::{Part, RankOrder, StagePart};
pub use ready::{Progress, Ready, ReadyKind};
pub use turns::Turns;
