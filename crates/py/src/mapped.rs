//! `MappedFile`: tensors in a file, whose pages are in memory while they are used.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use shardwright_offload::Mapped;

use crate::error::offload_error;
use crate::raw;

/// A file without a name in the place of memory, for what a rank keeps long and uses seldom.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct MappedFile(Arc<shardwright_offload::MappedFile>);

#[pymethods]
impl MappedFile {
    /// Make the file of a rank. Raises `OffloadError` where that is not possible.
    #[new]
    #[pyo3(signature = (*, rank, directory))]
    fn new(rank: u32, directory: PathBuf) -> PyResult<Self> {
        let made = shardwright_offload::MappedFile::make_in(directory, rank);
        made.map(Self).map_err(|error| offload_error(&error))
    }

    /// Whether the directory is in memory, so that nothing is saved.
    fn stays_in_memory(&self) -> bool {
        self.0.is_in_memory()
    }

    /// A place for so many bytes, of any values. Raises `OffloadError` where the disk is full.
    #[pyo3(signature = (nbytes, /))]
    fn map(&self, py: Python<'_>, nbytes: usize) -> PyResult<MappedMemory> {
        let mapped = py.detach(|| self.0.map(nbytes));
        let mapped = mapped.map_err(|error| offload_error(&error))?;
        Ok(MappedMemory(Arc::new(mapped)))
    }
}

/// A place in the file, mapped. It is there as long as this object, or a tensor of its bytes.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct MappedMemory(Arc<Mapped>);

#[pymethods]
impl MappedMemory {
    /// Its bytes as a capsule.
    #[pyo3(signature = () -> "object")]
    fn bytes(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        raw::capsule_of_mapped(py, Arc::clone(&self.0))
    }

    /// Bring bytes to memory, to be written. Raises `OffloadError` where they cannot be read.
    #[pyo3(signature = (offset, nbytes, /))]
    fn load(&self, py: Python<'_>, offset: usize, nbytes: usize) -> PyResult<()> {
        py.detach(|| self.0.load(offset, nbytes))
            .map_err(|error| offload_error(&error))
    }

    /// Take bytes out of memory; they stay in the file.
    #[pyo3(signature = (offset, nbytes, /))]
    fn release(&self, py: Python<'_>, offset: usize, nbytes: usize) {
        py.detach(|| self.0.release(offset, nbytes));
    }
}
