//! The unsafe part of knowing a forked child: to be told by the C library.
#![expect(unsafe_code, reason = "the C library takes a function pointer")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many forks lie between the first process that asked and this one: of the process, as its fork handlers are.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Whether the C library tells of forks, once for the process: a fork handler cannot be taken back.
static HANDLES_FORKS: OnceLock<bool> = OnceLock::new();

extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A number that differs between a process and its forked children; `None` where nobody tells of forks.
pub(super) fn forks() -> Option<u64> {
    let handles_forks = *HANDLES_FORKS.get_or_init(|| {
        // SAFETY: `count` may run in a child between fork and exec: it only adds to an atomic. It stays where it
        // is, since Python never unloads an extension.
        unsafe { libc::pthread_atfork(None, None, Some(count)) == 0 }
    });
    handles_forks.then(|| FORKS.load(Ordering::Relaxed))
}
