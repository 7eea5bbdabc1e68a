//! `AloneRecorder`: the timeline of a pipeline of one rank.

use std::time::{Instant, SystemTime};

use pyo3::prelude::*;
use pyo3::types::PyList;
use shardwright_core::StepEpoch;
use shardwright_wire::Phase;

use crate::server_types::trace_list;

/// Some hundred steps.
const CAPACITY: usize = 1 << 14;

/// Keeps the newest microbatches' forward and backward times, where no execution server runs them.
#[pyclass(module = "shardwright._core")]
pub(crate) struct AloneRecorder {
    recorder: shardwright_runtime::AloneRecorder,
    started: Instant,
    started_at: SystemTime,
}

#[pymethods]
impl AloneRecorder {
    /// Begin with nothing.
    #[new]
    fn new() -> Self {
        Self {
            recorder: shardwright_runtime::AloneRecorder::new(CAPACITY),
            started: Instant::now(),
            started_at: SystemTime::now(),
        }
    }

    /// The first microbatch of a step starts.
    #[pyo3(signature = (step, /))]
    fn begin(&mut self, step: u64) {
        let now = self.started.elapsed();
        self.recorder.begin(StepEpoch(step), now);
    }

    /// What ran since the last call was forward work.
    fn passed_forward(&mut self) {
        let now = self.started.elapsed();
        self.recorder.passed(Phase::Forward, now);
    }

    /// What ran since the last call was backward work.
    fn passed_backward(&mut self) {
        let now = self.started.elapsed();
        self.recorder.passed(Phase::Backward, now);
    }

    /// The microbatch is over, and the next one starts, if there is one.
    fn next_microbatch(&mut self) {
        let now = self.started.elapsed();
        self.recorder.next_microbatch(now);
    }

    /// The step's microbatches are over.
    fn end(&mut self) {
        self.recorder.end();
    }

    /// The records since the last call, oldest first, as those of global rank `rank`.
    #[pyo3(signature = (rank, /) -> "list[dict[str, Any]]")]
    fn take<'py>(&mut self, py: Python<'py>, rank: u32) -> PyResult<Bound<'py, PyList>> {
        let records = self.recorder.take();
        trace_list(py, rank, self.started_at, &records, |_, _| String::new())
    }
}
