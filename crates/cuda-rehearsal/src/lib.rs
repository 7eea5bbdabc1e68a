//! A stand-in for CUDA's driver, to rehearse transfers between devices, across processes, where there is no GPU.
//!
//! It has the functions of the driver's interface that `shardwright-cuda` loads. Device memory is a memory file that
//! processes share, at an address that the host may look at. A stream runs in a thread of its own, and *late*: each
//! copy waits first, so that whoever does not wait for its event sees the bytes from before.
//!
//! What the driver's contract leaves undefined ends the process with a word about it ([`Undefined`]): a program that
//! passes here has done none of it.
//!
//! Environment variables, read once: `REHEARSAL_DELAY_MICROSECONDS` before each copy (100), `REHEARSAL_DEVICE_BYTES`
//! of a device (1 GiB), `REHEARSAL_FAIL_AFTER` so many copies, from which on the device has failed (never),
//! `REHEARSAL_IPC` (`refused`: other processes' memory cannot be opened, as that of a device which is not visible).

mod capture;
mod device_streams;
mod memory;
mod raw;
mod settings;
#[cfg(test)]
mod tests;

pub use raw::*;

/// What the driver's contract leaves undefined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undefined {
    /// Memory was freed that another process, or another rank of this one, has open.
    FreedWhileOpen,
    /// Memory was freed, closed or unregistered that a queued copy reads or writes.
    GoneUnderACopy,
    /// A context was used after its last user had released it.
    ReleasedContext,
}

/// Why a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFailure {
    /// With this result.
    Code(i32),
    /// Nobody can tell how.
    Undefined(Undefined),
}

impl From<i32> for CallFailure {
    fn from(code: i32) -> Self {
        Self::Code(code)
    }
}

/// `CUDA_SUCCESS`.
pub const SUCCESS: i32 = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub const INVALID_VALUE: i32 = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_INVALID_DEVICE`.
pub const INVALID_DEVICE: i32 = 101;
/// `CUDA_ERROR_INVALID_CONTEXT`.
pub const INVALID_CONTEXT: i32 = 201;
/// `CUDA_ERROR_INVALID_HANDLE`.
pub const INVALID_HANDLE: i32 = 400;
/// `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: i32 = 600;
/// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
pub const ALREADY_REGISTERED: i32 = 712;
/// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`.
pub const NOT_REGISTERED: i32 = 713;
/// `CUDA_ERROR_LAUNCH_FAILED`.
pub const LAUNCH_FAILED: i32 = 719;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
pub const CAPTURE_UNSUPPORTED: i32 = 900;
/// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
pub const CAPTURE_INVALIDATED: i32 = 901;
/// `CUDA_ERROR_ILLEGAL_STATE`.
pub const ILLEGAL_STATE: i32 = 401;
