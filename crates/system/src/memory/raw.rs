//! The unsafe part of reading the heap: a function of the C library that older ones lack.
#![expect(unsafe_code, reason = "a function found at run time")]

use std::sync::OnceLock;

use crate::raw::Library;

type Mallinfo = unsafe extern "C" fn() -> libc::mallinfo2;

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
