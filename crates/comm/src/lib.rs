//! Messages between the ranks of a job: transports, rendezvous, the job's
//! secret, liveness, and the plane on which plain objects travel.

pub mod buffers;
#[cfg(test)]
#[cfg(feature = "shuttle")]
mod concurrency;
#[cfg(test)]
mod conformance;
mod connection;
pub mod counters;
pub mod cuda;
pub mod error;
#[cfg(feature = "fuzzing")]
pub mod hostile;
mod in_process;
mod job;
mod layers;
pub mod meeting;
pub mod node;
pub mod objects;
pub mod owner;
pub mod patience;
pub mod published;
mod raw;
pub mod router;
pub mod routing;
pub mod secret;
pub mod start_error;
pub mod sync;
pub mod tcp;
pub mod transport;
pub mod ucx;

use std::time::Duration;

pub use counters::{Carried, Counters};
pub use error::{CommError, describe_loss};
#[cfg(any(test, feature = "faults"))]
pub use in_process::faults::{Cut, Faults, FaultsError};
pub use in_process::{InProcess, in_process};
pub use job::{CommOptions, JobOptions, Memory};
pub use meeting::Meeting;
pub use node::{Joining, Node};
pub use objects::{ObjectPlane, barrier};
pub use owner::Owner;
pub use patience::{Patience, SLICE};
pub use published::Published;
pub use router::Router;
pub use secret::Secret;
pub use shardwright_wire::Beat;
pub use start_error::{Agreement, StartError};
pub use tcp::Listener;
pub use transport::{CommStats, Loss, PeerInfo, Pulse, Receiver, Sight, Transport};

/// Messages that may wait for one peer's connection. Far above what a step has
/// in flight, and an empty slot costs no more than a pointer or two.
pub const QUEUE_CAPACITY: usize = 4096;

/// How long a full queue may stay full while its peer is alive.
pub const BACKLOG_DEADLINE: Duration = Duration::from_secs(30);
