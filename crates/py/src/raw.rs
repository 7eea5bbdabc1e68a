//! The only unsafe code of the extension: memory that Python and Rust hand to each other.
#![expect(
    unsafe_code,
    reason = "memory of torch's tensors is reached by address"
)]

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use shardwright_comm::TensorMemory;
use shardwright_wire::{Buffer, Lent, Owned};

/// Copy memory that a live tensor owns.
pub(crate) fn copy_from(address: usize, nbytes: usize, into: &TensorMemory) -> Buffer {
    if nbytes == 0 {
        return Buffer::default();
    }
    // SAFETY: the caller of `TensorParts.append` passes the address and byte count of a dense
    // tensor, which it keeps alive and unchanged during the call.
    let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, nbytes) };
    into.copy_of(bytes)
}

/// Received bytes, writable through the buffer protocol, given back with their last tensor.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct ReceivedBuffer {
    start: *mut u8,
    len: usize,
    memory: Memory,
}

/// What `ReceivedBuffer` keeps until it is dropped.
enum Memory {
    /// A leaked boxed slice.
    Heap { words: *mut [u128] },
    /// A transport's memory, of which this is the sole owner.
    Lent { _owner: Arc<dyn Lent> },
}

// SAFETY: the memory is reached only through the buffer protocol, whose users (tensors) follow
// torch's own rules for access from several threads; Rust never reads it again.
unsafe impl Send for ReceivedBuffer {}
// SAFETY: as above: no method of this type touches the memory through a shared reference.
unsafe impl Sync for ReceivedBuffer {}

impl ReceivedBuffer {
    /// Take bytes over.
    pub(crate) fn new(buffer: Buffer) -> Self {
        let len = buffer.len();
        let (start, memory) = match buffer.into_owned() {
            Owned::Heap(words) => {
                let words = Box::into_raw(words.into_boxed_slice());
                (words.cast(), Memory::Heap { words })
            }
            Owned::Lent(owner) => (owner.start(), Memory::Lent { _owner: owner }),
        };
        Self { start, len, memory }
    }
}

impl Drop for ReceivedBuffer {
    fn drop(&mut self) {
        if let Memory::Heap { words } = self.memory {
            // SAFETY: `new` leaked exactly this boxed slice, and every buffer view holds a reference
            // to this object, so no view is left when it is dropped.
            drop(unsafe { Box::from_raw(words) });
        }
    }
}

#[pymethods]
impl ReceivedBuffer {
    fn __len__(&self) -> usize {
        self.len
    }

    /// # Safety
    /// Called by Python with a view to fill.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the signature that pyo3 asks for"
    )]
    unsafe fn __getbuffer__(
        slf: PyRef<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let (start, len) = (slf.start, slf.len.cast_signed());
        // SAFETY: `view` comes from Python; the memory lives as long as this object, to which
        // `PyBuffer_FillInfo` stores a reference in the view.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start.cast(), len, 0, flags) };
        if filled == 0 {
            return Ok(());
        }
        let failure = PyErr::take(slf.py());
        Err(failure.unwrap_or_else(|| PyBufferError::new_err("no view of received bytes")))
    }
}
