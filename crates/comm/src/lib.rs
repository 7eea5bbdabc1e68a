//! Messages between the ranks of a job: transports, rendezvous, the job's
//! secret, liveness, and the plane on which plain objects travel.

pub mod buffers;
#[cfg(test)]
#[cfg(feature = "shuttle")]
mod concurrency;
#[cfg(test)]
mod conformance;
pub mod connection;
pub mod counters;
pub mod cuda;
pub mod envelope;
pub mod error;
pub mod in_process;
pub mod meeting;
pub mod objects;
pub mod options;
pub mod owner;
pub mod patience;
pub mod published;
mod raw;
pub mod router;
pub mod routing;
pub mod secret;
pub mod sequence;
pub mod start_error;
pub mod sync;
pub mod tcp;
pub mod transport;
pub mod ucx;

use std::time::Duration;

pub use buffers::{Exchange, Pool, Reach, SHARED_BYTES};
pub use connection::Connection;
pub use counters::{Carried, Counters};
pub use envelope::{Damaged, Envelope};
pub use error::{CommError, describe_loss};
pub use in_process::faults::{Cut, Faults, FaultsError};
pub use in_process::{InProcess, in_process, in_process_with};
pub use meeting::Meeting;
pub use objects::{ObjectPlane, barrier};
pub use options::CommOptions;
pub use owner::Owner;
pub use patience::{Patience, SLICE};
pub use published::Published;
pub use router::Router;
pub use secret::Secret;
pub use sequence::{Gap, Sequencer, TooFarAhead};
pub use shardwright_wire::Beat;
pub use start_error::{Agreement, StartError};
pub use tcp::{JobOptions, Listener, Tcp, connect};
pub use transport::{CommStats, Loss, PeerInfo, Pulse, Receiver, Sight, Transport};

/// Messages that may wait for one peer's connection. Far above what a step has
/// in flight, and an empty slot costs no more than a pointer or two.
pub const QUEUE_CAPACITY: usize = 4096;

/// How long a full queue may stay full while its peer is alive.
pub const BACKLOG_DEADLINE: Duration = Duration::from_secs(30);
