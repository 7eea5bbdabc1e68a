//! `CheckpointMemory` and `PartInBackground`: parts of checkpoints that are written while training goes on.

use std::sync::Arc;

use pyo3::prelude::*;
use shardwright_checkpoint::{self as checkpoint, Background};
use shardwright_comm::SLICE;

use crate::checkpoint::report_text;
use crate::error::checkpoint_error;
use crate::interruptible::interruptible;

/// Host memory for copies of what `CheckpointWriter.write_part_in_background` writes. It grows to what the parts that are
/// written at the same time need, and is used again.
#[pyclass(frozen, module = "shardwright._core")]
#[derive(Default)]
pub(crate) struct CheckpointMemory(Background);

impl CheckpointMemory {
    pub(crate) fn background(&self) -> &Background {
        &self.0
    }
}

#[pymethods]
impl CheckpointMemory {
    /// None is taken yet.
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Give up what no part is written from now.
    fn free(&self) {
        self.0.free_memory();
    }
}

/// A part of a checkpoint that a thread writes.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct PartInBackground(checkpoint::PartInBackground);

impl PartInBackground {
    pub(crate) fn new(part: checkpoint::PartInBackground) -> Self {
        Self(part)
    }
}

#[pymethods]
impl PartInBackground {
    /// Whether it has been written, or could not be.
    #[getter]
    fn is_done(&self) -> bool {
        self.0.is_done()
    }

    /// Wait until it has been written, while other Python threads run: the report for `commit`. Raises `ShardwrightError` if
    /// it could not be. It can be called again.
    fn wait(&self, py: Python<'_>) -> PyResult<String> {
        let ended = interruptible(py, |goes_on| {
            loop {
                let ended = self.0.wait_for(SLICE);
                if ended.is_some() || !goes_on() {
                    return ended;
                }
            }
        })?;
        let result = ended.expect("an interrupted wait has raised");
        result
            .map(|report| report_text(&report))
            .map_err(|error: Arc<_>| checkpoint_error(&error))
    }
}
