//! The unsafe part of mapped files: memory whose contents are in a file.
#![expect(unsafe_code, reason = "pages of a mapping are taken out of memory")]

use std::fs::File;
use std::io;

use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};

/// A shared mapping of a part of a file that nobody else has and that does not shrink.
#[derive(Debug)]
pub(super) struct Mapping(MmapRaw);

impl Mapping {
    pub(super) fn of(file: &File, offset: u64, bytes: usize) -> io::Result<Self> {
        let options = MmapOptions::new().offset(offset).len(bytes).to_owned();
        options.map_raw(file).map(Self)
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn advise(&self, advice: Advice, offset: usize, bytes: usize) -> io::Result<()> {
        self.0.advise_range(advice, offset, bytes)
    }

    #[cfg(test)]
    pub(super) fn copy_in(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len(), "inside the mapping");
        // SAFETY: the range is inside the mapping, and tests have no references to it.
        let into = unsafe { self.start().add(offset) };
        // SAFETY: as above.
        unsafe { into.copy_from(bytes.as_ptr(), bytes.len()) };
    }

    #[cfg(test)]
    pub(super) fn copy_out(&self, offset: usize, bytes: usize) -> Vec<u8> {
        assert!(offset + bytes <= self.len(), "inside the mapping");
        // SAFETY: as above, and files begin as zeros.
        unsafe { std::slice::from_raw_parts(self.start().add(offset), bytes) }.to_vec()
    }

    pub(super) fn release(&self, offset: usize, bytes: usize) {
        // SAFETY: the mapping is shared (`map_raw`), so that its pages have the same contents when they come back: those
        // of the file. The caller's range is inside it.
        let done = unsafe {
            self.0
                .unchecked_advise_range(UncheckedAdvice::DontNeed, offset, bytes)
        };
        debug_assert!(done.is_ok(), "it is mapped: {done:?}");
    }
}
