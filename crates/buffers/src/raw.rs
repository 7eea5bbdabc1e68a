//! The unsafe part of persistent buffers: memory that two processes map.
#![expect(
    unsafe_code,
    reason = "mapped memory is reached by address, and written by two processes in turn"
)]

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use memmap2::{MmapOptions, MmapRaw};

use shardwright_system::sync::others_may_run;

/// A whole mapped buffer. Its file cannot shrink (the caller has checked the seal), so that
/// every byte stays there as long as the mapping.
pub(super) struct Mapping(MmapRaw);

impl Mapping {
    pub(super) fn of(file: &File, bytes: usize) -> io::Result<Self> {
        MmapOptions::new().len(bytes).map_raw(file).map(Self)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// A word of the head; only ever used as an atomic, by both processes.
    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(4) && offset + 4 <= super::layout::HEAD_BYTES.min(self.len()),
            "the word lies in the head"
        );
        others_may_run();
        // SAFETY: the word is inside the mapping, which lives as long as `self`, and aligned: mappings
        // begin at pages. No reference to the head but these atomics is ever made.
        unsafe { AtomicU32::from_ptr(self.0.as_mut_ptr().add(offset).cast()) }
    }
}

/// A range of a mapping that belongs to its holder alone (BU-1). Whoever makes one upholds
/// that: the pool by its allocator, an import by the slot that it has taken.
pub(super) struct MappedRange {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
}

impl MappedRange {
    pub(super) fn new(mapping: Arc<Mapping>, offset: usize, len: usize) -> Self {
        let inside = offset
            .checked_add(len)
            .is_some_and(|end| offset >= super::layout::HEAD_BYTES && end <= mapping.len());
        assert!(inside, "the piece lies among the blocks");
        Self {
            mapping,
            offset,
            len,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn start(&self) -> *mut u8 {
        // SAFETY: the offset is inside the mapping (checked by `new`).
        unsafe { self.mapping.0.as_mut_ptr().add(self.offset) }
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        // SAFETY: the range is inside the mapping (checked by `new`), initialized (files begin as zeros), and
        // nobody else writes it while this piece exists (BU-1).
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }

    pub(super) fn as_mut_bytes(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` keeps this process's own readers out.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }
}
