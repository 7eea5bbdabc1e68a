//! A file in the place of memory: tensors are mapped, and their pages are in memory only while they are used.

mod raw;

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::Advice;
use shardwright_buffers::Block;

use crate::error::OffloadError;
use crate::file::{Places, StorageFile};

/// A file without a name with places for tensors, each of which is mapped by itself.
#[derive(Debug)]
pub struct MappedFile {
    rank: u32,
    file: StorageFile,
    places: Mutex<Places>,
}

impl MappedFile {
    /// Makes the file of a rank in a directory.
    pub fn make_in(directory: PathBuf, rank: u32) -> Result<Arc<Self>, OffloadError> {
        let file = StorageFile::make_in(&directory).map_err(|error| OffloadError::Directory {
            rank,
            what: "the optimizer's state",
            directory,
            reason: error.to_string(),
        })?;
        Ok(Arc::new(Self {
            rank,
            file,
            places: Mutex::new(Places::new()),
        }))
    }

    /// Whether what is written stays in memory, because the directory is of a file system that has no disk.
    pub fn is_in_memory(&self) -> bool {
        self.file.is_in_memory()
    }

    /// Sets bytes aside and maps them. They have any values: a place may have been used before.
    pub fn map(self: &Arc<Self>, bytes: usize) -> Result<Mapped, OffloadError> {
        let failed = |error: &io::Error| self.failed("set aside", bytes, error);
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let place = self
            .places()
            .take(bytes as u64)
            .ok_or_else(|| failed(&full()))?;
        let mapped = self
            .file
            .reserve(&place)
            .and_then(|()| raw::Mapping::of(self.file.descriptor(), place.offset, bytes));
        match mapped {
            Ok(mapping) => Ok(Mapped {
                mapping,
                place: Some(place),
                file: Arc::clone(self),
            }),
            Err(error) => {
                self.places().give_back(place);
                Err(failed(&error))
            }
        }
    }

    /// How large the file is.
    #[cfg(test)]
    pub(crate) fn size(&self) -> u64 {
        self.places().size
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, what: &'static str, bytes: usize, error: &io::Error) -> OffloadError {
        OffloadError::State {
            rank: self.rank,
            what,
            bytes,
            directory: self.file.directory.clone(),
            reason: error.to_string(),
        }
    }
}

/// The bytes of one tensor, mapped; their place in the file is free again with this.
#[derive(Debug)]
pub struct Mapped {
    mapping: raw::Mapping,
    place: Option<Block>,
    file: Arc<MappedFile>,
}

impl Mapped {
    /// Where they begin.
    pub fn start(&self) -> *mut u8 {
        self.mapping.start()
    }

    /// How many they are.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Brings bytes to memory, to be written: waits for the disk. A place that the disk cannot give is an error here,
    /// and would end the process where it is touched.
    pub fn load(&self, offset: usize, bytes: usize) -> Result<(), OffloadError> {
        match self.advise(Advice::PopulateWrite, offset, bytes) {
            // Kernels before 5.14 begin to read, and say nothing of errors.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                let _begun = self.advise(Advice::WillNeed, offset, bytes);
                Ok(())
            }
            done => done.map_err(|error| self.file.failed("read", bytes, &error)),
        }
    }

    /// Takes the pages of bytes out of this process's memory. What was written to them is in the system's cache of the
    /// file, which it writes in its own time, before it needs the memory for something else.
    pub fn release(&self, offset: usize, bytes: usize) {
        let (offset, bytes) = self.inside(offset, bytes);
        if bytes > 0 {
            self.mapping.release(offset, bytes);
        }
    }

    #[cfg(test)]
    pub(crate) fn copy_in(&self, offset: usize, bytes: &[u8]) {
        self.mapping.copy_in(offset, bytes);
    }

    #[cfg(test)]
    pub(crate) fn copy_out(&self, offset: usize, bytes: usize) -> Vec<u8> {
        self.mapping.copy_out(offset, bytes)
    }

    fn advise(&self, advice: Advice, offset: usize, bytes: usize) -> io::Result<()> {
        let (offset, bytes) = self.inside(offset, bytes);
        if bytes == 0 {
            return Ok(());
        }
        self.mapping.advise(advice, offset, bytes)
    }

    fn inside(&self, offset: usize, bytes: usize) -> (usize, usize) {
        let offset = offset.min(self.len());
        (offset, bytes.min(self.len() - offset))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            self.file.places().give_back(place);
        }
    }
}
