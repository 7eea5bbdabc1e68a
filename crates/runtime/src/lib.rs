//! The execution server: who runs when on a rank, and how steps begin, end and fail.
//!
//! A pure state machine, [`Machine`], takes events (a worker asks, a message arrives, time
//! passes) and decides; a thin shell, [`Server`], puts it behind one short lock that Python's
//! threads and the transport's threads enter, wakes whoever got the turn, and sends.
//! Nothing here knows torch or Python. The reasons and the numbered invariants (EX-1 and on)
//! stand in `docs/design/execution.md`.

mod alone;
mod counters;
mod deadlock;
mod failure;
mod machine;
mod outbox;
mod predictions;
mod server;
mod state;
mod trace;
mod usage;
mod waiting;

#[cfg(test)]
mod tests;

pub use alone::AloneRecorder;
pub use counters::{Stats, TaskCounters, WorkCounts};
pub use deadlock::{Announcement, Collective, DeadlockProof, QUIET_SECONDS, WaitId, WaitState};
pub use failure::{Failure, FailureKind, LocalError, ServerError};
pub use machine::{
    About, Deferred, Effect, Expected, Grant, Machine, MachineConfig, MainEvent, NewRequest,
    StateKey, StepPlan, Task, Waiting,
};
pub use predictions::{Prediction, PredictionRules, Predictions, SiteId, SiteKey};
pub use server::Server;
pub use trace::{TraceKind, TraceRecord};
pub use usage::Usage;
