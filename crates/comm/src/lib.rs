//! Messages between the ranks of a job: transports, rendezvous, the job's
//! secret, liveness, and the plane on which plain objects travel.

#[cfg(test)]
#[cfg(feature = "shuttle")]
mod concurrency;
#[cfg(test)]
mod conformance;
mod connection;
mod counters;
mod deadline;
mod device;
mod error;
mod exchange;
#[cfg(feature = "fuzzing")]
pub mod hostile;
mod in_process;
mod job;
mod layers;
mod local_rendezvous;
mod node;
mod objects;
mod published;
mod rendezvous;
mod router;
mod routing;
mod secret;
mod start_error;
#[cfg(not(feature = "fuzzing"))]
mod tcp;
#[cfg(feature = "fuzzing")]
pub mod tcp;
mod transport;
#[cfg(not(feature = "fuzzing"))]
mod ucx;
#[cfg(feature = "fuzzing")]
pub mod ucx;

use std::time::Duration;

pub use counters::Carried;
pub use deadline::{Deadline, SLICE};
pub use error::{CommError, describe_loss};
#[cfg(any(test, feature = "faults"))]
pub use in_process::faults::{Cut, Faults, FaultsError};
pub use in_process::{InProcess, in_process};
pub use job::{CommOptions, JobOptions, TensorMemory};
pub use node::{Joining, Node};
pub use objects::ObjectPlane;
pub use rendezvous::Rendezvous;
pub use router::Router;
pub use routing::{Reason, Route, TransportChoice};
pub use secret::{FEWEST_SECRET_BYTES, Secret, WeakSecret};
pub use shardwright_system::sync;
pub use shardwright_wire::Heartbeat;
pub use start_error::StartError;
pub use transport::{CommStats, HeartbeatState, Loss, Observation, PeerInfo, Receiver, Transport};

/// Messages that may wait for one peer's connection. Far above what a step has
/// in flight, and an empty slot costs no more than a pointer or two.
pub(crate) const QUEUE_CAPACITY: usize = 4096;

/// How long a full queue may stay full while its peer is alive.
pub(crate) const BACKLOG_DEADLINE: Duration = Duration::from_secs(30);
