//! `IncomingPart` and `IncomingCopy`: parts of checkpoints whose bytes come one after another.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use shardwright_checkpoint::{PartCopy, PartWriter};

use crate::checkpoint::report_text;
use crate::checkpoint_background::PartInBackground;
use crate::checkpoint_pieces::with_bytes;
use crate::error::{argument_error, checkpoint_error};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ended() -> PyErr {
    argument_error("the part has ended")
}

fn check_all(left: u64) -> PyResult<()> {
    match left {
        0 => Ok(()),
        left => Err(argument_error(format!(
            "{left} bytes of the part are missing"
        ))),
    }
}

/// A rank's file of a checkpoint, while its bytes come. Nothing is left of it unless `finish` succeeds.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct IncomingPart(Mutex<Option<PartWriter>>);

impl IncomingPart {
    pub(crate) fn new(part: PartWriter) -> Self {
        Self(Mutex::new(Some(part)))
    }
}

#[pymethods]
impl IncomingPart {
    /// The places of the pieces in the order in which their elements are wanted. Empty ones are not among them.
    fn order(&self) -> PyResult<Vec<usize>> {
        Ok(lock(&self.0).as_ref().ok_or_else(ended)?.order().to_vec())
    }

    /// Hash and write the next elements, those of a contiguous tensor in host memory, while other Python threads run. Raises
    /// `ShardwrightError`.
    #[pyo3(signature = (elements, /))]
    fn write(&self, elements: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut part = lock(&self.0);
        let part = part.as_mut().ok_or_else(ended)?;
        let written = with_bytes(elements, part.left(), |bytes| part.write(bytes))?;
        written.map_err(|error| checkpoint_error(&error))
    }

    /// Bring the file down to the disk: the report for `commit`. Raises `ShardwrightError`.
    fn finish(&self, py: Python<'_>) -> PyResult<String> {
        let part = lock(&self.0).take().ok_or_else(ended)?;
        check_all(part.left())?;
        let report = py.detach(|| part.finish());
        report
            .map(|report| report_text(&report))
            .map_err(|error| checkpoint_error(&error))
    }
}

/// The copy of a part for the background, while its bytes come.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct IncomingCopy(Mutex<Option<PartCopy>>);

impl IncomingCopy {
    pub(crate) fn new(copy: PartCopy) -> Self {
        Self(Mutex::new(Some(copy)))
    }
}

#[pymethods]
impl IncomingCopy {
    /// Copy the next elements, in the order of the pieces: those of a contiguous tensor in host memory.
    #[pyo3(signature = (elements, /))]
    fn write(&self, elements: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut copy = lock(&self.0);
        let copy = copy.as_mut().ok_or_else(ended)?;
        with_bytes(elements, copy.left(), |bytes| copy.write(bytes))
    }

    /// Let a thread write the part. Raises `ShardwrightError`.
    fn finish(&self, py: Python<'_>) -> PyResult<PartInBackground> {
        let copy = lock(&self.0).take().ok_or_else(ended)?;
        check_all(copy.left())?;
        let begun = py.detach(|| copy.finish());
        begun
            .map(PartInBackground::new)
            .map_err(|error| checkpoint_error(&error))
    }
}
