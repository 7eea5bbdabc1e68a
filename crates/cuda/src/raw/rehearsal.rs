//! What tests ask of the stand-in for the driver, and no other part of the library of a driver.

use std::ffi::{OsStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::{Device, Driver, Stream, pointer};
use crate::error::CudaError;
use shardwright_system::functions;

functions! {
    struct DriverFunctions;
    begin_capture = "cuStreamBeginCapture_v2": fn(*mut c_void, c_int) -> c_int;
    end_capture = "cuStreamEndCapture": fn(*mut c_void, *mut *mut c_void) -> c_int;
    stop = "rehearsal_stop": fn(u64, c_int) -> ();
}

/// A stream of a script's.
pub struct ScriptStream(Stream);

impl ScriptStream {
    /// Its number, as torch writes them.
    pub fn handle(&self) -> u64 {
        self.0.handle()
    }
}

/// The stand-in, as a script uses the driver beside the library.
pub struct Rehearsal {
    functions: DriverFunctions,
    device: Arc<Device>,
}

impl Rehearsal {
    /// Loads it.
    pub fn load(path: &OsStr) -> Self {
        let driver = Driver::load(path).unwrap();
        // SAFETY: it is loaded already.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.unwrap();
        // SAFETY: the stand-in's functions, with these types.
        let functions = unsafe { DriverFunctions::find(&library) }.unwrap();
        std::mem::forget(library);
        let device = Device::open(&driver, 0).unwrap();
        Self { functions, device }
    }

    /// A stream of its own.
    pub fn stream(&self) -> ScriptStream {
        ScriptStream(Stream::new(&self.device).unwrap())
    }

    /// Begins to capture a stream in the mode that forbids most: what `torch.cuda.graph` does.
    pub fn begin_capture(&self, stream: &ScriptStream) {
        let begun = self.device.call("cuStreamBeginCapture", |_| {
            // SAFETY: a live stream.
            unsafe { (self.functions.begin_capture)(pointer(stream.handle()), 0) }
        });
        begun.unwrap();
    }

    /// Ends it; an error where it was spoilt.
    pub fn end_capture(&self, stream: &ScriptStream) -> Result<(), CudaError> {
        let mut graph = ptr::null_mut();
        self.device.call("cuStreamEndCapture", |_| {
            // SAFETY: a live stream, and a place for a graph.
            unsafe { (self.functions.end_capture)(pointer(stream.handle()), &raw mut graph) }
        })
    }

    /// Lets a stream stand, or run again.
    pub fn stop(&self, stream: u64, stops: bool) {
        // SAFETY: two numbers.
        unsafe { (self.functions.stop)(stream, c_int::from(stops)) };
    }
}
