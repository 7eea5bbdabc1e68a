//! UCX: active messages over shared memory and, where a job trusts its network, TCP.
//!
//! UCX is looked for at run time, and nothing here needs it to build. This layer moves messages
//! between workers and reports what happens; routes, liveness and threads belong to its callers.
//!
//! - UCX-1: a message that was accepted by `send` ends with exactly one `Sent` or `SendFailed`.
//! - UCX-2: memory of a message is freed only when UCX is done with it; closing frees all of it.
//! - UCX-3: no payload above the limit is ever allocated for, nor any of a sender that does not show the worker's
//!   key; and of one sender only so much may be announced at a time.
//! - UCX-4: messages from one worker to another arrive in the order of sending as long as all of
//!   them are sent eagerly or all are announced first (rendezvous). Between the two kinds there
//!   is no order: an announced message is complete only when its data have been fetched, and
//!   small ones sent after it come before that. Two announced messages may end in either order.
//! - UCX-5: nothing of a peer is reported after its endpoint was abandoned.
//! - UCX-6: nothing stays in `/dev/shm`, however a process ends.

mod admission;
mod endpoint;
mod error;
mod library;
mod options;
mod raw;
mod spare;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests;
mod transports;
#[cfg(not(feature = "shuttle"))]
mod wakes;
#[cfg_attr(feature = "shuttle", path = "modelled.rs")]
mod worker;

pub use admission::{Admission, AdmissionKey, KEY_BYTES};
pub use endpoint::{Armed, EndpointId};
pub use error::{ReceiveRefusal, UcxError, WorkerEvent};
pub use library::{Candidates, Library, LibraryError, LoadedLibrary, Source, Version};
pub use options::{Options, WITH_TCP, WITHIN_HOST};
pub use transports::transports;
#[cfg(feature = "shuttle")]
pub use worker::Network;
pub use worker::{EventHandle, Wakes, Worker};
