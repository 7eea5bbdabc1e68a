//! What tests ask the stand-in, and nobody a driver.

use std::ffi::c_int;

use super::{MACHINE, memory};

/// How much there is in this process of streams, events, and memory that was allocated, opened or registered; not of
/// the driver's interface.
#[unsafe(no_mangle)]
pub extern "C" fn rehearsal_held() -> u64 {
    (MACHINE.len() + memory(|memory| memory.len())) as u64
}

/// How many bytes of host memory are registered; not of the driver's interface.
#[unsafe(no_mangle)]
pub extern "C" fn rehearsal_registered_bytes() -> u64 {
    memory(|memory| memory.registered_bytes())
}

/// Lets a stream stand, or run again, as one whose kernel takes long; not of the driver's interface.
#[unsafe(no_mangle)]
pub extern "C" fn rehearsal_stop(stream: u64, stops: c_int) {
    MACHINE.stop(stream, stops != 0);
}
