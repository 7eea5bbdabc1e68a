//! The only unsafe code of the CUDA path: the driver's C interface, wrapped so that the rest is safe.
//!
//! Who upholds what:
//! - Every call happens with the device's primary context (torch's own) current, which is pushed before it and
//!   popped after it, so that the calling thread's context stays what it was.
//! - Every call is made in the relaxed mode of capture, which is the thread's own affair: in the mode that threads begin
//!   with, a query of an event spoils the graph that a script captures in another thread. Streams that are being
//!   captured themselves are left alone ([`Device::is_capturing`]).
//! - Handles are numbers here, and each belongs to one Rust value that destroys it.
//! - A copy's two ranges stay there, and belong to the copy alone, until an event behind it is done:
//!   [`super::memory`] keeps what it reads and writes until then.
#![expect(unsafe_code, reason = "CUDA's driver is a C library")]

mod functions;
#[cfg(feature = "testing")]
#[expect(clippy::unwrap_used, reason = "tests may panic")]
pub(super) mod rehearsal;

use std::ffi::{CStr, OsStr, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use self::functions::{DriverFunctions, IPC_HANDLE_BYTES, IpcHandle};
use super::error::CudaError;
use shardwright_system::raw::in_full;

/// What another process needs to open device memory.
pub(super) type MemoryHandle = [u8; IPC_HANDLE_BYTES];

/// A device's identity, the same in all processes.
pub(super) type Uuid = [u8; 16];

const NOT_READY: c_int = 600;
/// Opens peers' memory from the device that is current.
const LAZY_PEER_ACCESS: c_uint = 1;
/// A stream that does not wait for the default stream.
const NON_BLOCKING: c_uint = 1;
/// An event without a clock, which is cheaper.
const DISABLE_TIMING: c_uint = 2;
/// Calls that are no part of a capture do not spoil one (`CU_STREAM_CAPTURE_MODE_RELAXED`).
const RELAXED: c_int = 2;
/// Registered memory that every context of the process may use.
const PORTABLE: c_uint = 1;

/// The driver's library, loaded for the rest of the process's life.
pub(super) struct Driver {
    functions: DriverFunctions,
}

impl Driver {
    /// Loads the driver from a path, or by its name from the system's directories; asks it for nothing yet.
    pub(super) fn load(path: &OsStr) -> Result<Arc<Self>, String> {
        // SAFETY: the initialisers of the driver's library set up its own state only.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| in_full(&error))?;
        // SAFETY: a library with all these names is CUDA's driver, whose interface keeps these types.
        let functions =
            unsafe { DriverFunctions::find(&library) }.map_err(|error| in_full(&error))?;
        // Never unloaded, so that the functions stay callable.
        std::mem::forget(library);
        Ok(Arc::new(Self { functions }))
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: a place for a pointer to a text that is never freed.
        let named = unsafe { (self.functions.error_name)(code, &raw mut text) };
        let name = if named == 0 && !text.is_null() {
            // SAFETY: the driver's own text, which ends with a zero.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        } else {
            "an unknown error".to_owned()
        };
        Err(CudaError { call, code, name })
    }
}

/// A device, with its primary context retained.
pub(super) struct Device {
    driver: Arc<Driver>,
    number: c_int,
    context: usize,
    uuid: Uuid,
}

impl Device {
    /// The device of a number, as this process counts them.
    pub(super) fn open(driver: &Arc<Driver>, ordinal: i32) -> Result<Arc<Self>, CudaError> {
        let driver = Arc::clone(driver);
        let functions = &driver.functions;
        let (mut device, mut context, mut uuid) = (0, ptr::null_mut(), [0; 16]);
        // SAFETY: takes flags, which are none.
        driver.check("cuInit", unsafe { (functions.init)(0) })?;
        // SAFETY: a place for a device.
        let code = unsafe { (functions.device)(&raw mut device, ordinal) };
        driver.check("cuDeviceGet", code)?;
        // SAFETY: a place for 16 bytes, and a device.
        let code = unsafe { (functions.device_uuid)(uuid.as_mut_ptr().cast(), device) };
        driver.check("cuDeviceGetUuid", code)?;
        // SAFETY: a place for a context, and a device.
        let code = unsafe { (functions.retain_context)(&raw mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Arc::new(Self {
            number: device,
            context: context.expose_provenance(),
            uuid,
            driver,
        }))
    }

    /// Which device it is.
    pub(super) fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Whether a stream is being captured into a graph: what it is given does not run, and cannot be waited for.
    pub(super) fn is_capturing(&self, stream: u64) -> bool {
        let mut status = 0;
        let asked = self.call("cuStreamIsCapturing", |functions| {
            // SAFETY: a stream as in `copy`, and a place for a number.
            unsafe { (functions.stream_is_capturing)(pointer(stream), &raw mut status) }
        });
        // The default stream cannot even be asked while one that waits for it is being captured.
        asked.is_err() || status != 0
    }

    /// New device memory.
    pub(super) fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        let mut address = 0;
        self.call("cuMemAlloc", |functions| {
            // SAFETY: a place for an address.
            unsafe { (functions.allocate)(&raw mut address, bytes) }
        })?;
        Ok(address)
    }

    /// Frees device memory, whose users are done.
    pub(super) fn free(&self, address: u64) -> Result<(), CudaError> {
        self.call("cuMemFree", |functions| {
            // SAFETY: the driver refuses what it has not handed out.
            unsafe { (functions.free)(address) }
        })
    }

    /// What another process needs to open this memory.
    pub(super) fn share(&self, address: u64) -> Result<MemoryHandle, CudaError> {
        let mut handle = IpcHandle([0; IPC_HANDLE_BYTES]);
        self.call("cuIpcGetMemHandle", |functions| {
            // SAFETY: a place for a handle; the driver refuses what it has not handed out.
            unsafe { (functions.share)(&raw mut handle, address) }
        })?;
        Ok(handle.0)
    }

    /// Opens another process's memory, for this device to reach.
    pub(super) fn open_shared(&self, handle: MemoryHandle) -> Result<u64, CudaError> {
        let mut address = 0;
        self.call("cuIpcOpenMemHandle", |functions| {
            // SAFETY: a place for an address; the driver refuses handles that it has not made.
            unsafe {
                (functions.open_shared)(&raw mut address, IpcHandle(handle), LAZY_PEER_ACCESS)
            }
        })?;
        Ok(address)
    }

    /// How many bytes the memory at an address has, from there on, as the driver knows it.
    pub(super) fn bytes_from(&self, address: u64) -> Result<u64, CudaError> {
        let (mut start, mut bytes) = (0, 0);
        self.call("cuMemGetAddressRange", |functions| {
            // SAFETY: two places for the results; the driver refuses what it does not know.
            unsafe { (functions.range)(&raw mut start, &raw mut bytes, address) }
        })?;
        let end = start.saturating_add(bytes as u64);
        Ok(end.saturating_sub(address))
    }

    /// Closes another process's memory, whose users here are done.
    pub(super) fn close_shared(&self, address: u64) -> Result<(), CudaError> {
        self.call("cuIpcCloseMemHandle", |functions| {
            // SAFETY: the driver refuses what it has not opened.
            unsafe { (functions.close_shared)(address) }
        })
    }

    /// Queues a copy between two ranges, each of this host or of a device that this one reaches; the event behind it.
    /// Both stay there until that is done.
    pub(super) fn copy(
        self: &Arc<Self>,
        to: u64,
        from: u64,
        bytes: usize,
        stream: u64,
    ) -> Result<CudaEvent, CudaError> {
        self.call("cuMemcpyAsync", |functions| {
            // SAFETY: the caller keeps both ranges until an event behind the copy is done; a stream is torch's
            // current one, or one of `Stream`.
            unsafe { (functions.copy)(to, from, bytes, pointer(stream)) }
        })?;
        CudaEvent::behind(self, stream)
    }

    /// Locks host memory in place, so that devices copy from and to it by themselves.
    pub(super) fn register(&self, start: *mut u8, bytes: usize) -> Result<(), CudaError> {
        self.call("cuMemHostRegister", |functions| {
            // SAFETY: the mapping is there until `unregister`, by its owner.
            unsafe { (functions.register)(start.cast(), bytes, PORTABLE) }
        })
    }

    /// Undoes [`Self::register`].
    pub(super) fn unregister(&self, start: usize) -> Result<(), CudaError> {
        self.call("cuMemHostUnregister", |functions| {
            // SAFETY: the driver refuses what is not registered.
            unsafe { (functions.unregister)(pointer(start as u64)) }
        })
    }

    /// Calls a function with this device's context current, in a way that spoils no capture.
    fn call(
        &self,
        name: &'static str,
        function: impl FnOnce(&DriverFunctions) -> c_int,
    ) -> Result<(), CudaError> {
        let functions = &self.driver.functions;
        let mut popped = ptr::null_mut();
        let mut mode = RELAXED;
        // SAFETY: the context is retained as long as `self`.
        let code = unsafe { (functions.push_context)(pointer(self.context as u64)) };
        self.driver.check("cuCtxPushCurrent", code)?;
        // SAFETY: a mode, and the place for the one before it; it changes nothing but what this thread is refused.
        let relaxed = unsafe { (functions.exchange_capture_mode)(&raw mut mode) };
        let code = function(functions);
        if relaxed == 0 {
            // SAFETY: as above, with what the first call gave.
            unsafe { (functions.exchange_capture_mode)(&raw mut mode) };
        }
        // SAFETY: a place for a context; pops the one that was pushed above.
        let after = unsafe { (functions.pop_context)(&raw mut popped) };
        self.driver.check(name, code)?;
        self.driver
            .check("cuThreadExchangeStreamCaptureMode", relaxed)?;
        self.driver.check("cuCtxPopCurrent", after)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: undoes the retaining of `open`.
        let code = unsafe { (self.driver.functions.release_context)(self.number) };
        if let Err(error) = self.driver.check("cuDevicePrimaryCtxRelease", code) {
            tracing::debug!(%error, "a device's context was gone before");
        }
    }
}

/// A stream of this library.
pub(super) struct Stream {
    device: Arc<Device>,
    handle: u64,
}

impl Stream {
    /// One that waits for no other.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let mut handle = ptr::null_mut();
        device.call("cuStreamCreate", |functions| {
            // SAFETY: a place for a stream.
            unsafe { (functions.stream_create)(&raw mut handle, NON_BLOCKING) }
        })?;
        Ok(Self {
            device: Arc::clone(device),
            handle: handle.expose_provenance() as u64,
        })
    }

    /// Its number, as torch writes them too.
    pub(super) fn handle(&self) -> u64 {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let destroyed = self.device.call("cuStreamDestroy", |functions| {
            // SAFETY: the stream of `new`, destroyed once; what is queued on it still runs.
            unsafe { (functions.stream_destroy)(pointer(self.handle)) }
        });
        if let Err(error) = destroyed {
            tracing::debug!(%error, "a stream was gone before");
        }
    }
}

/// A place in a stream that can be asked whether it has been reached.
pub struct CudaEvent {
    device: Arc<Device>,
    handle: u64,
}

impl CudaEvent {
    /// Behind all that a stream has been given so far.
    pub(super) fn behind(device: &Arc<Device>, stream: u64) -> Result<Self, CudaError> {
        let mut handle = ptr::null_mut();
        device.call("cuEventCreate", |functions| {
            // SAFETY: a place for an event.
            unsafe { (functions.event_create)(&raw mut handle, DISABLE_TIMING) }
        })?;
        let event = Self {
            device: Arc::clone(device),
            handle: handle.expose_provenance() as u64,
        };
        device.call("cuEventRecord", |functions| {
            // SAFETY: an event of this context; a stream as in `copy`.
            unsafe { (functions.event_record)(pointer(event.handle), pointer(stream)) }
        })?;
        Ok(event)
    }

    /// Whether it has been reached; an error when what is before it failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let asked = self.device.call("cuEventQuery", |functions| {
            // SAFETY: the event of `behind`.
            unsafe { (functions.event_query)(pointer(self.handle)) }
        });
        match asked {
            Ok(()) => Ok(true),
            Err(error) if error.code == NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let destroyed = self.device.call("cuEventDestroy", |functions| {
            // SAFETY: the event of `behind`, destroyed once.
            unsafe { (functions.event_destroy)(pointer(self.handle)) }
        });
        if let Err(error) = destroyed {
            tracing::debug!(%error, "an event was gone before");
        }
    }
}

/// A handle as the driver takes it.
fn pointer(handle: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(handle as usize)
}
