//! TCP between the processes of a job.
//!
//! Threads: one accepts connections and reads from all who have not proved anything yet; per peer one reads and one writes. A
//! reader owns what arrives from its peer, and finding the peer lost; a writer
//! owns the queue to its peer, and the heartbeats. They share only the socket,
//! so that a peer that takes nothing cannot keep its silence from being noticed.
//!
//! - TCP-1: nothing of a connection is interpreted before both sides have proved
//!   the job's secret, and until then at most a few hundred bytes are read, within
//!   [`HANDSHAKE_DEADLINE`], of a bounded number of pending connections. What they say is blamed on no rank.
//! - TCP-2: a rank that has not sent a byte for the liveness timeout is lost, and one whose frame has begun and
//!   does not get on; a rank that is alive sends a byte at least four times as often.
//! - TCP-3: a forked child does nothing to the sockets.

mod acceptor;
mod acceptor_state;
mod address;
mod connection;
mod dial;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod handshake;
mod link;
mod pending;
mod registry;
mod rendezvous;
mod stream;
mod table;
#[cfg(test)]
pub(crate) mod testing;
mod transport;

use std::time::Duration;

pub(crate) use address::Listener;
pub(crate) use rendezvous::connect;
pub(crate) use transport::Tcp;

/// How long a pending connection may take to prove the secret.
pub(crate) const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// How long a process that has proved the secret may take to register.
pub(crate) const REGISTRATION_DEADLINE: Duration = Duration::from_secs(10);

/// How long rank 0 waits for the ranks still missing once it knows that the job
/// cannot start, so that they learn why.
pub(crate) const GRACE: Duration = Duration::from_secs(4);

/// How long the acceptor's end waits for a handshake to notice it.
const HANDSHAKES_END: Duration = Duration::from_secs(1);
