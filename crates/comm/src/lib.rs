//! Messages between the ranks of a job: transports, rendezvous, the job's
//! secret, liveness, and the plane on which plain objects travel.

pub mod error;
pub mod transport;

pub use error::{CommError, describe_loss};
pub use shardwright_wire::Beat;
pub use transport::{CommStats, Loss, PeerInfo, Pulse, Receiver, Transport};
