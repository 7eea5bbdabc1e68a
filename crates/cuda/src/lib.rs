//! Tensors in the memory of CUDA devices, on their way between ranks.
//!
//! A rank keeps one piece of device memory, which the other ranks of its host open once, beside its persistent
//! buffer of host memory, whose head says how to open it and whose slots give its blocks back. A tensor that leaves
//! torch is copied into it in the order of torch's current stream, and nobody waits: its message leaves once the
//! copy is done, and the receiver copies it from there into memory of torch's allocator. Where the receiver cannot
//! open it, or there is no room, the tensor goes through registered host memory.
//!
//! - CU-1: a message leaves when its tensors are there, by an event behind their copies. No stream ever waits for
//!   another rank, so a rank that dies leaves no device waiting.
//! - CU-2: what a copy reads or writes stays its own until an event behind it is done, whoever drops it.
//! - CU-3: messages of a pair of ranks leave in the order of sending (CM-2), also when one waits for a device.
//! - CU-4: nothing of the driver is called before a tensor of a device is sent or received.
//! - CU-5: whatever the driver refuses, tensors go through host memory; a device that has failed ends the
//!   connection with a reason.
//! - CU-6: nobody writes to a block of device memory after the copy into it. So it may be lent to several ranks at
//!   once, and to some while this one holds it.
//! - CU-7: nobody waits for the thread in that thread, and nobody gives a device up that has not failed. A slow queue is
//!   told of, and waited for until the connection is closed.
//! - CU-8: device memory is freed when no other rank has it open. Each says so in the buffer's head, before it opens it
//!   and after it has closed it; a rank that leaves waits for that, and keeps the memory where it is not said in time.
//! - CU-9: no call of this library's spoils a graph that a script captures, in this thread or another.

mod buffer;
mod device;
mod error;
mod job_queue;
mod memory;
mod pace;
mod raw;
mod tensor;
#[cfg(test)]
mod tests;

pub use buffer::PeerDevice;
pub use device::StageError;
pub use error::CudaError;
pub use job_queue::{Bounds, Job, JobQueue, Refused, Retained};
pub use memory::{Capturing, DeviceMemory};
pub use pace::pause;
pub use raw::CudaEvent;
#[cfg(feature = "testing")]
pub use raw::rehearsal::{Rehearsal, ScriptStream};
pub use tensor::DeviceTensor;
