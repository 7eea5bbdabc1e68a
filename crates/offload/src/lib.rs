//! Tensors that checkpoints keep for the backward, out of memory until shortly before they are needed: on disk, or in a
//! pool of host memory.
//!
//! [`Plan`] decides what is where: pure, no clock, no I/O. [`Offload`] has it done by one thread for all transfers.
//!
//! - OF-1: a tensor that a call keeps is in memory or in the storage at every moment: nothing is let go before it is
//!   stored, and what could not be stored stays in memory.
//! - OF-2: the tensors of the calls whose second computations come within the horizon, and of those that need them now, are
//!   in memory or on their way there.
//! - OF-3: all others are in the storage or on their way there, and not in memory as well; but what a call has just been
//!   computed again from is not stored any more before the next task.
//! - OF-4: a tensor that no call keeps any more takes no place, once what is under way with it has ended.
//! - OF-5: a tensor is stored at most once, and loaded only while it is not in memory.
//! - OF-6: the file of a rank has no name: nothing of it is left when the process ends, however it ends.
//! - OF-7: a tensor of a device is stored after its frontend has brought it to host memory, and is lost by the frontend only
//!   after that: until then it is in memory for the plan, and no bytes are here.
//!
//! What is kept for longer, an optimizer's state, is in a [`MappedFile`], of whose tensors only what is used is in memory.

#[cfg(all(test, feature = "shuttle"))]
#[expect(clippy::unwrap_used, reason = "tests may panic")]
mod concurrency;
mod counts;
mod error;
mod file;
mod mapped;
mod mover;
mod plan;
mod pool;
mod shell;
#[cfg(test)]
mod tests;
mod trace;

pub use counts::Counts;
pub use error::{OffloadError, Subject};
pub use mapped::{Mapped, MappedFile};
pub use plan::{CallId, Order, Plan, Task, TensorId};
pub use pool::{HostBlock, HostPool, LeasedBlock};
pub use shell::{Changes, Offload, Options};
pub use trace::{Direction, Span};
