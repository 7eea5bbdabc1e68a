//! Settings that UCX reads from the environment while it is being loaded.

use std::ffi::{CString, c_char};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

unsafe extern "C" {
    /// The environment of the process (`environ(7)`), a list that ends with a null pointer.
    static mut environ: *mut *mut c_char;
}

/// One load at a time in the process, whose environment it changes.
static LOADING: Mutex<()> = Mutex::new(());

/// Runs `action` while the process's environment also holds `settings` (`NAME=value`).
///
/// `setenv` would change the list in place and may free it while another thread reads it. Instead
/// the list is replaced as a whole by a copy that is never freed, and put back afterwards: a
/// thread that reads the environment meanwhile sees one list or the other, both valid for ever.
/// If another thread has set a variable meanwhile, its list stays.
pub(crate) fn with_settings<T>(settings: &[String], action: impl FnOnce() -> T) -> T {
    let _one_at_a_time = LOADING
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    // SAFETY: `environ` is a pointer-sized, pointer-aligned variable of libc that lives as long
    // as the process; libc itself reads and writes it as one word.
    let list = unsafe { AtomicPtr::from_ptr(&raw mut environ) };
    let before = list.load(Ordering::Acquire);
    let mut entries: Vec<*mut c_char> = settings
        .iter()
        .filter_map(|setting| CString::new(setting.as_str()).ok())
        .map(CString::into_raw)
        .collect();
    let mut place = before;
    // SAFETY: the list is an array of pointers that ends with a null pointer, or there is none.
    while let Some(entry) = unsafe { place.as_ref() }.filter(|entry| !entry.is_null()) {
        entries.push(*entry);
        // SAFETY: this entry was not the last one, so the next lies in the same array.
        place = unsafe { place.add(1) };
    }
    entries.push(std::ptr::null_mut());
    let extended = Box::leak(entries.into_boxed_slice()).as_mut_ptr();
    list.store(extended, Ordering::Release);
    let result = action();
    let put_back = list.compare_exchange(extended, before, Ordering::AcqRel, Ordering::Acquire);
    if put_back.is_err() {
        tracing::debug!("another thread changed the environment while UCX was loaded");
    }
    result
}
