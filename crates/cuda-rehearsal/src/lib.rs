//! A stand-in for CUDA's driver, to rehearse transfers between devices, across processes, where there is no GPU.
//!
//! It has the functions of the driver's interface that `shardwright-comm` loads. Device memory is a memory file that
//! processes share, at an address that the host may look at. A stream runs in a thread of its own, and *late*: each
//! copy waits first, so that whoever does not wait for its event sees the bytes from before.
//!
//! Environment variables, read once: `REHEARSAL_DELAY_MICROSECONDS` before each copy (100), `REHEARSAL_DEVICE_BYTES`
//! of a device (1 GiB), `REHEARSAL_FAIL_AFTER` so many copies, from which on the device has failed (never).

mod machine;
mod memory;
mod raw;
#[cfg(test)]
mod tests;

pub use raw::*;

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
