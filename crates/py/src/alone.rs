//! `AloneRecorder`: the timeline and the usage of a pipeline of one rank.

use std::time::{Duration, Instant, SystemTime};

use pyo3::prelude::*;
use shardwright_core::StepEpoch;
use shardwright_wire::Phase;

use crate::timeline::{Timeline, timeline_of};
use crate::usage::PyUsage;

/// Some hundred steps.
const CAPACITY: usize = 1 << 14;

/// Keeps the microbatches' forward and backward times, where no execution server runs them.
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

    /// The time, for `recomputed`.
    fn clock_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// A checkpointed module was computed again since then.
    #[pyo3(signature = (began_ns, /))]
    fn recomputed(&mut self, began_ns: u64) {
        let now = self.started.elapsed();
        self.recorder
            .recomputed(Duration::from_nanos(began_ns), now);
    }

    /// The microbatch is over, and the next one starts, if there is one.
    fn next_microbatch(&mut self) {
        let now = self.started.elapsed();
        self.recorder.next_microbatch(now);
    }

    /// The step's microbatches are over.
    fn end(&mut self) {
        let now = self.started.elapsed();
        self.recorder.end(now);
    }

    /// The step's gradients are finished: it has ended well.
    fn commit(&mut self) {
        let now = self.started.elapsed();
        self.recorder.commit(now);
    }

    /// Where the time went of all steps that ended well, and of the newest one.
    fn usage(&self) -> (PyUsage, PyUsage) {
        let (total, newest) = self.recorder.usage();
        (PyUsage(total.clone()), PyUsage(newest.clone()))
    }

    /// Keep records from now on, or keep none.
    #[pyo3(signature = (on, /))]
    fn keep_trace(&mut self, on: bool) {
        self.recorder.keep_trace(on);
    }

    /// The records since the last call, as those of global rank `rank`.
    #[pyo3(signature = (rank, /))]
    fn take_trace(&mut self, rank: u32) -> PyResult<Timeline> {
        let (records, lost) = self.recorder.take();
        timeline_of(rank, self.started_at, &records, lost, |_, _| String::new())
    }
}
