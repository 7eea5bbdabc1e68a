//! The only unsafe code of the extension: memory that Python and Rust hand to each other.
#![expect(
    unsafe_code,
    reason = "memory of torch's tensors is reached by address"
)]

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use shardwright_comm::TensorMemory;
use shardwright_offload::{HostBlock, Mapped};
use shardwright_wire::{Buffer, Lent, Owned};

/// Copy memory that a live tensor owns.
pub(crate) fn copy_from(address: usize, nbytes: usize, into: &TensorMemory) -> Buffer {
    if nbytes == 0 {
        return Buffer::default();
    }
    // SAFETY: `TensorParts.append` passes the address and byte count that a dense tensor says of itself, which its
    // caller keeps alive and unchanged meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, nbytes) };
    into.copy_of(bytes)
}

/// Copy memory that a live tensor owns, for as long as the caller waits.
pub(crate) fn copy_to_heap(address: usize, nbytes: usize) -> Buffer {
    if nbytes == 0 {
        return Buffer::default();
    }
    // SAFETY: as for `copy_from`: address and byte count are those of a dense tensor that its caller keeps alive and
    // unchanged meanwhile.
    Buffer::copy_of(unsafe { std::slice::from_raw_parts(address as *const u8, nbytes) })
}

/// Memory of a tensor that is kept alive.
pub(crate) fn bytes_of(_tensor: &Py<PyAny>, address: usize, nbytes: usize) -> &[u8] {
    if nbytes == 0 {
        return &[];
    }
    // SAFETY: `checkpoint::Memory::of` takes address and byte count of a dense tensor in host memory, which its reference
    // keeps alive; the caller of the binding leaves it unchanged meanwhile.
    unsafe { std::slice::from_raw_parts(address as *const u8, nbytes) }
}

/// Memory of a tensor that is kept alive, to be written.
pub(crate) fn bytes_into(_tensor: &mut Py<PyAny>, address: usize, nbytes: usize) -> &mut [u8] {
    if nbytes == 0 {
        return &mut [];
    }
    // SAFETY: as in `bytes_of`; `checkpoint::check_apart` has seen that no other slice of the same read is of this memory.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, nbytes) }
}

/// Host memory that an object of Python owns, such as a tensor in locked memory, and that is given to nobody else.
struct OwnedByPython {
    start: usize,
    nbytes: usize,
    _owner: Py<PyAny>,
}

impl HostBlock for OwnedByPython {
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: the owner has so many bytes there for as long as it lives; a device writes to them only before the
        // frontend says that they have arrived, and nobody looks at them until then.
        unsafe { std::slice::from_raw_parts(self.start(), self.nbytes) }
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the pool gives a block to one at a time, and no device reads it before it is shared.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.nbytes) }
    }

    fn start(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.start)
    }

    fn len(&self) -> usize {
        self.nbytes
    }
}

/// A block for a pool, of memory that `owner` has at an address and that nobody else uses.
pub(crate) fn host_block(owner: Py<PyAny>, address: usize, nbytes: usize) -> Box<dyn HostBlock> {
    Box::new(OwnedByPython {
        start: address,
        nbytes,
        _owner: owner,
    })
}

/// How many references to an object there are.
pub(crate) fn references_to(object: &Bound<'_, PyAny>) -> isize {
    // SAFETY: the object is alive, and the interpreter is held.
    unsafe { ffi::Py_REFCNT(object.as_ptr()) }
}

/// The name of a capsule that nobody has taken a tensor out of, as `DLPack` has it.
const UNUSED: &CStr = c"dltensor";

/// `DLDevice` of `DLPack` 1.0's ABI; the host is type 1.
#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

/// `DLDataType`.
#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// What a capsule owns: bytes, and what `DLPack` says of the tensor in them.
#[repr(C)]
struct Exported {
    managed: Managed,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _memory: Memory,
}

/// Memory of received bytes.
#[expect(dead_code, reason = "kept until the tensor is gone, never looked at")]
enum Memory {
    Heap(Vec<u128>),
    Lent(Arc<dyn Lent>),
    Shared(Buffer),
    Mapped(Arc<Mapped>),
}

/// A tensor's bytes as a `DLPack` capsule, which is their only owner; `kind` is `DLPack`'s code and bits of an element.
///
/// The caller has seen to it that shape and strides, in elements, stay within the bytes.
pub(crate) fn capsule_of(
    py: Python<'_>,
    buffer: Buffer,
    kind: (u8, u8),
    shape: Vec<i64>,
    strides: Vec<i64>,
) -> PyResult<Py<PyAny>> {
    let (start, memory) = match buffer.into_owned() {
        Owned::Heap(mut words) => (words.as_mut_ptr().cast(), Memory::Heap(words)),
        Owned::Lent(owner) => (owner.start(), Memory::Lent(owner)),
    };
    export(py, start, memory, kind, shape, strides)
}

/// Bytes as a `DLPack` capsule of a tensor of bytes, which others may share: it must not be written to.
pub(crate) fn capsule_of_shared(py: Python<'_>, buffer: Buffer) -> PyResult<Py<PyAny>> {
    let start = buffer.as_lent().map_or_else(
        || buffer.as_bytes().as_ptr().cast_mut(),
        |lent| lent.start(), // a device may be about to fill it
    );
    let len = buffer.len();
    let shape = vec![i64::try_from(len).unwrap_or(i64::MAX)];
    export(py, start, Memory::Shared(buffer), (1, 8), shape, vec![1])
}

/// Mapped bytes as a `DLPack` capsule of a tensor of bytes.
pub(crate) fn capsule_of_mapped(py: Python<'_>, mapped: Arc<Mapped>) -> PyResult<Py<PyAny>> {
    let shape = vec![i64::try_from(mapped.len()).unwrap_or(i64::MAX)];
    let start = mapped.start();
    export(py, start, Memory::Mapped(mapped), (1, 8), shape, vec![1])
}

fn export(
    py: Python<'_>,
    start: *mut u8,
    memory: Memory,
    kind: (u8, u8),
    shape: Vec<i64>,
    strides: Vec<i64>,
) -> PyResult<Py<PyAny>> {
    let mut exported = Box::new(Exported {
        managed: Managed {
            tensor: Tensor {
                data: start.cast::<c_void>(),
                device: Device { kind: 1, id: 0 },
                ndim: i32::try_from(shape.len()).unwrap_or(i32::MAX),
                dtype: DataType {
                    code: kind.0,
                    bits: kind.1,
                    lanes: 1,
                },
                shape: std::ptr::null_mut(),
                strides: std::ptr::null_mut(),
                byte_offset: 0,
            },
            context: std::ptr::null_mut(),
            deleter: Some(delete),
        },
        shape,
        strides,
        _memory: memory,
    });
    exported.managed.tensor.shape = exported.shape.as_mut_ptr();
    exported.managed.tensor.strides = exported.strides.as_mut_ptr();
    let exported = Box::into_raw(exported);
    // SAFETY: the pointer is not null and the name lives for ever; `delete_unused` is what the capsule calls at its end.
    let capsule =
        unsafe { ffi::PyCapsule_New(exported.cast(), UNUSED.as_ptr(), Some(delete_unused)) };
    // SAFETY: a new reference, or null with an exception set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    if capsule.is_err() {
        // SAFETY: no capsule has taken it.
        unsafe { delete(exported.cast()) };
    }
    Ok(capsule?.unbind())
}

/// # Safety
/// `managed` is of [`export`], and is not used any more: its `deleter`, called once, by whoever took the tensor.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: `Exported` begins with it (`repr(C)`), and `export` made it by `Box::into_raw`.
    drop(unsafe { Box::from_raw(managed.cast::<Exported>()) });
}

/// # Safety
/// Called by Python with a capsule of [`export`] that nothing refers to any more.
unsafe extern "C" fn delete_unused(capsule: *mut ffi::PyObject) {
    // SAFETY: whoever takes the tensor gives the capsule another name, and frees the tensor by its deleter.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNUSED.as_ptr()) != 0 {
            delete(ffi::PyCapsule_GetPointer(capsule, UNUSED.as_ptr()).cast());
        }
    }
}
