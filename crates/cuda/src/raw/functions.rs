//! The driver's functions, found by name at run time.

use std::ffi::{c_char, c_int, c_uint, c_void};

use shardwright_system::functions;

type Handle = *mut c_void;
type Address = u64;

/// The size of a handle for another process.
pub(crate) const IPC_HANDLE_BYTES: usize = 64;

/// `CUipcMemHandle`, which the interface takes by value.
#[repr(C)]
pub(super) struct IpcHandle(pub(super) [u8; IPC_HANDLE_BYTES]);

functions! {
    /// The functions of CUDA's driver that device transfers need. All but the text's return 0 on success.
    pub(super) struct DriverFunctions;
    /// `(error, text)`: the name of an error, which lives for ever.
    error_name = "cuGetErrorName": fn(c_int, *mut *const c_char) -> c_int;
    /// `(flags)`: initialises the driver; does nothing when it is.
    init = "cuInit": fn(c_uint) -> c_int;
    /// `(device, ordinal)`: a device by its number in this process.
    device = "cuDeviceGet": fn(*mut c_int, c_int) -> c_int;
    /// `(uuid, device)`: the 16 bytes that identify a device, or its part.
    device_uuid = "cuDeviceGetUuid_v2": fn(*mut c_void, c_int) -> c_int;
    /// `(context, device)`: the context that the runtime interface uses too.
    retain_context = "cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int) -> c_int;
    /// `(device)`: undoes one retaining.
    release_context = "cuDevicePrimaryCtxRelease_v2": fn(c_int) -> c_int;
    /// `(context)`: makes a context the calling thread's.
    push_context = "cuCtxPushCurrent_v2": fn(Handle) -> c_int;
    /// `(context)`: gives the calling thread the one that it had before.
    pop_context = "cuCtxPopCurrent_v2": fn(*mut Handle) -> c_int;
    /// `(address, bytes)`: device memory.
    allocate = "cuMemAlloc_v2": fn(*mut Address, usize) -> c_int;
    /// `(address)`: frees it.
    free = "cuMemFree_v2": fn(Address) -> c_int;
    /// `(handle, address)`: what another process needs to open device memory.
    share = "cuIpcGetMemHandle": fn(*mut IpcHandle, Address) -> c_int;
    /// `(address, handle, flags)`: opens another process's memory.
    open_shared = "cuIpcOpenMemHandle_v2": fn(*mut Address, IpcHandle, c_uint) -> c_int;
    /// `(start, bytes, address)`: the whole allocation that an address lies in, opened ones too.
    range = "cuMemGetAddressRange_v2": fn(*mut Address, *mut usize, Address) -> c_int;
    /// `(address)`: closes it.
    close_shared = "cuIpcCloseMemHandle": fn(Address) -> c_int;
    /// `(to, from, bytes, stream)`: queues a copy; the addresses tell whose memory it is.
    copy = "cuMemcpyAsync": fn(Address, Address, usize, Handle) -> c_int;
    /// `(start, bytes, flags)`: locks host memory in place.
    register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint) -> c_int;
    /// `(start)`: undoes that.
    unregister = "cuMemHostUnregister": fn(*mut c_void) -> c_int;
    /// `(stream, flags)`: a stream.
    stream_create = "cuStreamCreate": fn(*mut Handle, c_uint) -> c_int;
    /// `(stream)`: frees it once what is queued on it has run.
    stream_destroy = "cuStreamDestroy_v2": fn(Handle) -> c_int;
    /// `(stream, status)`: 0 for a stream that is not being captured into a graph.
    stream_is_capturing = "cuStreamIsCapturing": fn(Handle, *mut c_int) -> c_int;
    /// `(mode)`: which calls are refused to the calling thread while others capture; gives the one before.
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode": fn(*mut c_int) -> c_int;
    /// `(event, flags)`: an event.
    event_create = "cuEventCreate": fn(*mut Handle, c_uint) -> c_int;
    /// `(event, stream)`: puts it behind what the stream has been given.
    event_record = "cuEventRecord": fn(Handle, Handle) -> c_int;
    /// `(event)`: 600 while it has not been reached; earlier failures of the device show here too.
    event_query = "cuEventQuery": fn(Handle) -> c_int;
    /// `(event)`: frees it.
    event_destroy = "cuEventDestroy_v2": fn(Handle) -> c_int;
}
