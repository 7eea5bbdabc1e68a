//! The unsafe part of reading and setting the heap: functions that not every C library has.
#![expect(unsafe_code, reason = "functions found at run time")]

use std::sync::OnceLock;

use crate::raw::Library;

type Mallinfo = unsafe extern "C" fn() -> libc::mallinfo2;

type Mallopt = unsafe extern "C" fn(libc::c_int, libc::c_int) -> libc::c_int;

/// Has the C library keep allocations of so many bytes or more out of its heaps, and give them back to the system when
/// they are freed; returns whether it does.
pub fn map_large_allocations(bytes: i32) -> bool {
    // SAFETY: glibc's function of this name has this type.
    let Ok(mallopt) = (unsafe { Library::this().get::<Mallopt>(b"mallopt") }) else {
        return false;
    };
    // SAFETY: it locks what it changes, and refuses values that it cannot use.
    unsafe { mallopt(libc::M_MMAP_THRESHOLD, bytes) == 1 }
}

/// Bytes that the C library's heaps have given out; `None` where it does not tell.
pub fn heap_bytes() -> Option<u64> {
    static FOUND: OnceLock<Option<Mallinfo>> = OnceLock::new();
    let mallinfo = (*FOUND.get_or_init(|| {
        // SAFETY: glibc's function of this name has this type.
        unsafe {
            Library::this()
                .get::<Mallinfo>(b"mallinfo2")
                .ok()
                .map(|found| *found)
        }
    }))?;
    // SAFETY: it locks each heap while it reads it, and has no arguments.
    let info = unsafe { mallinfo() };
    Some(info.uordblks as u64 + info.hblkhd as u64)
}
