//! Persistent buffers: host memory that a rank keeps for tensors on their way, and that
//! the other ranks of its host map once (the paper's appendix G.2).
//!
//! A tensor that leaves torch is copied into its rank's buffer. A rank of the same host
//! gets its place and reads it there, without a further copy; the bytes for any other
//! rank are sent from there. The receiver gives a place back by writing into its slot,
//! which the owner reads when it next looks for room: no message, no waiting.
//!
//! - BU-1: a block is in the hands of one process at a time: the owner's until it is
//!   lent, the receiver's from the message on, the owner's again once the slot says so.
//!   What somebody of the owner's still holds is copied into a block that is lent.
//! - BU-2: what a buffer holds at most is fixed when it is made. A tensor for which there
//!   is no room travels inside its message.
//! - BU-3: the memory belongs to no file system: it ends with the processes that map it.
//! - BU-4: a forked child neither takes blocks nor gives any back.

mod allocator;
#[cfg(test)]
#[cfg(feature = "shuttle")]
mod concurrency;
mod import;
mod layout;
mod pool;
mod raw;
#[cfg(test)]
mod tests;
mod zone;

pub use allocator::{Allocator, Block, NotAllocated};
pub use import::{DeviceUse, Import, ImportError, TakenBlock};
pub use layout::DeviceOffer;
pub use pool::{Offer, Pool};
pub use zone::Zone;

/// Smaller tensors travel inside their message: copying them costs less than their slot, which a receiver that has
/// slept finds in nobody's cache. With its control part such a message fits into one of UCX's segments (8 KiB).
pub const SHARED_BYTES: usize = 6 * 1024;
