//! The driver's interface, and the copying. A caller passes places to write to, as the driver's own contract says.
#![expect(
    unsafe_code,
    reason = "it is a C interface, and copies between addresses"
)]
#![expect(
    clippy::missing_safety_doc,
    reason = "the contract is that of the driver's function of the same name"
)]

mod own;

pub use own::*;

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use crate::capture::Mode;
use crate::device_streams::DeviceStreams;
use crate::memory::ProcessMemory;
use crate::settings::{number, text};
use crate::{
    ALREADY_REGISTERED, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, CallFailure, ILLEGAL_STATE,
    INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, LAUNCH_FAILED, NOT_READY,
    NOT_REGISTERED, OUT_OF_MEMORY, SUCCESS, Undefined,
};

/// The only context there is.
const CONTEXT: usize = 0xc0;

static MACHINE: LazyLock<DeviceStreams> = LazyLock::new(|| {
    let delay = number("REHEARSAL_DELAY_MICROSECONDS").unwrap_or(100);
    DeviceStreams::new(Duration::from_micros(delay), number("REHEARSAL_FAIL_AFTER"))
});

static MEMORY: LazyLock<Mutex<ProcessMemory>> = LazyLock::new(|| {
    let capacity = number("REHEARSAL_DEVICE_BYTES").unwrap_or(1 << 30);
    Mutex::new(ProcessMemory::new(capacity as usize))
});

/// How many users have retained the context.
static USERS: AtomicI64 = AtomicI64::new(0);

thread_local! {
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// `CUipcMemHandle`.
#[repr(C)]
pub struct IpcMemoryHandle(pub [u8; 64]);

/// The result of what needs a current context.
fn current<E: Into<CallFailure>>(outcome: impl FnOnce() -> Result<(), E>) -> c_int {
    if CONTEXTS.with_borrow(Vec::is_empty) {
        return INVALID_CONTEXT;
    }
    if USERS.load(Ordering::SeqCst) < 1 {
        undefined(Undefined::ReleasedContext);
    }
    match outcome().map_err(Into::into) {
        Ok(()) => SUCCESS,
        Err(CallFailure::Code(code)) => code,
        Err(CallFailure::Undefined(what)) => undefined(what),
    }
}

/// The same, for what could spoil a capture of any thread.
fn unsafe_call<E: Into<CallFailure>>(outcome: impl FnOnce() -> Result<(), E>) -> c_int {
    current(|| {
        MACHINE.unsafe_call(MODE.get())?;
        outcome().map_err(Into::into)
    })
}

/// Nobody can tell what a device would do now.
#[expect(
    clippy::print_stderr,
    reason = "the process ends here, and has no other way to say why"
)]
fn undefined(what: Undefined) -> ! {
    eprintln!("undefined in CUDA: {what:?}");
    std::process::abort();
}

fn memory<T>(look: impl FnOnce(&mut ProcessMemory) -> T) -> T {
    look(&mut MEMORY.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Writes a result where the caller wants it.
fn put<T>(to: *mut T, value: T) {
    // SAFETY: the caller of each exported function passes a place for its result.
    unsafe { to.write(value) };
}

fn copy(to: u64, from: u64, bytes: usize) {
    // SAFETY: the caller of `cuMemcpyAsync` keeps both ranges until an event behind the copy is done.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
}

fn start(stream: u64) {
    let name = format!("stream-{stream}");
    let thread = std::thread::Builder::new().name(name);
    thread
        .spawn(move || MACHINE.run(stream, copy))
        .expect("a stream has a thread");
}

fn handle(pointer: *mut c_void) -> u64 {
    pointer.addr() as u64
}

fn pointer(handle: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(handle as usize)
}

/// The name of an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: c_int, text: *mut *const c_char) -> c_int {
    let name: &CStr = match error {
        SUCCESS => c"CUDA_SUCCESS",
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        NOT_READY => c"CUDA_ERROR_NOT_READY",
        ALREADY_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        NOT_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
        ILLEGAL_STATE => c"CUDA_ERROR_ILLEGAL_STATE",
        CAPTURE_UNSUPPORTED => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        CAPTURE_INVALIDATED => c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        _ => return INVALID_VALUE,
    };
    put(text, name.as_ptr());
    SUCCESS
}

/// Initialises nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(_flags: c_uint) -> c_int {
    SUCCESS
}

/// The only device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    put(device, 0);
    if ordinal == 0 {
        SUCCESS
    } else {
        INVALID_DEVICE
    }
}

/// The device's identity.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut c_void, _device: c_int) -> c_int {
    put(uuid.cast(), *b"rehearsed device");
    SUCCESS
}

/// The device's context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: *mut *mut c_void,
    _device: c_int,
) -> c_int {
    put(context, pointer(CONTEXT as u64));
    USERS.fetch_add(1, Ordering::SeqCst);
    SUCCESS
}

/// Releases it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    if USERS.fetch_sub(1, Ordering::SeqCst) < 1 {
        undefined(Undefined::ReleasedContext);
    }
    SUCCESS
}

/// Makes a context current.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> c_int {
    if context.addr() != CONTEXT {
        return INVALID_CONTEXT;
    }
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(context.addr()));
    SUCCESS
}

/// Makes the one before current.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> c_int {
    let popped = CONTEXTS.with_borrow_mut(Vec::pop);
    put(context, pointer(popped.unwrap_or(0) as u64));
    popped.map_or(INVALID_CONTEXT, |_| SUCCESS)
}

/// Device memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
    unsafe_call(|| memory(|memory| memory.allocate(bytes)).map(|made| put(address, made)))
}

/// Frees device memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    unsafe_call(|| {
        goes(address)?;
        memory(|memory| memory.free(address))
    })
}

/// What another process needs to open device memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut IpcMemoryHandle, address: u64) -> c_int {
    current(|| {
        memory(|memory| memory.share(address)).map(|made| put(handle, IpcMemoryHandle(made)))
    })
}

/// Opens another process's memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    address: *mut u64,
    handle: IpcMemoryHandle,
    _flags: c_uint,
) -> c_int {
    unsafe_call(|| {
        if text("REHEARSAL_IPC").as_deref() == Some("refused") {
            return Err(INVALID_DEVICE);
        }
        memory(|memory| memory.open(&handle.0)).map(|made| put(address, made))
    })
}

/// The allocation that an address lies in.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    start: *mut u64,
    bytes: *mut usize,
    address: u64,
) -> c_int {
    current(|| {
        memory(|memory| memory.range(address)).map(|(found, length)| {
            put(start, found);
            put(bytes, length);
        })
    })
}

/// Closes another process's memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcCloseMemHandle(address: u64) -> c_int {
    unsafe_call(|| {
        goes(address)?;
        memory(|memory| memory.close(address)).map_err(CallFailure::from)
    })
}

/// Queues a copy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyAsync(
    to: u64,
    from: u64,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    if MACHINE.claims_default_stream() {
        start(0);
    }
    current(|| MACHINE.copy(to, from, bytes, handle(stream)))
}

/// Memory is about to go.
fn goes(address: u64) -> Result<(), CallFailure> {
    MACHINE.goes(address, memory(|memory| memory.len_of(address)))
}

/// Locks nothing, and remembers it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(
    start: *mut c_void,
    bytes: usize,
    _flags: c_uint,
) -> c_int {
    unsafe_call(|| memory(|memory| memory.register(handle(start), bytes)))
}

/// Undoes that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostUnregister(start: *mut c_void) -> c_int {
    unsafe_call(|| {
        goes(handle(start))?;
        memory(|memory| memory.unregister(handle(start))).map_err(CallFailure::from)
    })
}

/// A stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, _flags: c_uint) -> c_int {
    current(|| {
        let made = MACHINE.create_stream();
        start(made);
        put(stream, pointer(made));
        Ok::<_, c_int>(())
    })
}

/// Ends a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> c_int {
    current(|| MACHINE.destroy_stream(handle(stream)))
}

/// An event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _flags: c_uint) -> c_int {
    current(|| {
        put(event, pointer(MACHINE.create_event()));
        Ok::<_, c_int>(())
    })
}

/// Puts an event behind what a stream has been given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> c_int {
    if MACHINE.claims_default_stream() {
        start(0);
    }
    current(|| MACHINE.record(handle(event), handle(stream)))
}

/// Whether an event has been reached.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: *mut c_void) -> c_int {
    unsafe_call(|| MACHINE.query(handle(event)))
}

/// Ends an event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> c_int {
    current(|| MACHINE.destroy_event(handle(event)))
}

/// Begins to capture a stream, whose operations do not run meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_int) -> c_int {
    let Some(mode) = Mode::of(mode) else {
        return INVALID_VALUE;
    };
    current(|| MACHINE.begin_capture(handle(stream), mode))
}

/// Ends it; the graph is forgotten.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> c_int {
    put(graph, std::ptr::null_mut());
    current(|| MACHINE.end_capture(handle(stream)))
}

/// Whether a stream is being captured: 0 or 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_int) -> c_int {
    put(status, c_int::from(MACHINE.is_capturing(handle(stream))));
    current(|| Ok::<_, c_int>(()))
}

/// Holds the calling thread to another mode, and gives the one before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    // SAFETY: the caller passes a mode, and a place for the one before.
    let Some(wanted) = Mode::of(unsafe { mode.read() }) else {
        return INVALID_VALUE;
    };
    put(mode, MODE.replace(wanted) as c_int);
    SUCCESS
}
