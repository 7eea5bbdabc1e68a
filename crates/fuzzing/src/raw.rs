//! An allocator that counts what each thread holds. The only unsafe code of the crate.
#![expect(unsafe_code, reason = "an allocator hands out memory by address")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, and a count.
pub(crate) struct Counting;

fn count(change: isize) {
    // A thread that ends has no counters any more, and nobody asks for them.
    let counted = HELD.try_with(|held| {
        held.set(held.get() + change);
        held.get()
    });
    if let Ok(now) = counted {
        let noted = MOST.try_with(|most| most.set(most.get().max(now)));
        debug_assert!(noted.is_ok());
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting neither allocates nor unwinds, because
// the counters are plain numbers without a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller's promises are the system allocator's conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // While it moves, both are held.
        count(size.cast_signed());
        count(-layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Does something, and says how many bytes this thread then held at most, beyond what it held before.
pub(crate) fn most_held<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    MOST.set(before);
    let result = work();
    (
        result,
        MOST.get().saturating_sub(before).max(0).cast_unsigned(),
    )
}
