//! When the microbatches of a pipeline of one rank ran, whose main thread runs them itself, and what their time adds up to.

use std::time::Duration;

use shardwright_core::{MicrobatchId, StepEpoch};
use shardwright_wire::Phase;

use crate::trace::{TraceKind, TraceRecord, TraceRing};
use crate::usage::Usage;

/// The microbatch that the main thread runs.
#[derive(Clone, Copy, Debug)]
struct Running {
    step: StepEpoch,
    microbatch: MicrobatchId,
    since: Duration,
}

impl Running {
    fn record(self, kind: TraceKind, phase: Phase, start: Duration, end: Duration) -> TraceRecord {
        TraceRecord {
            step: self.step,
            kind,
            worker: None,
            phase: Some(phase),
            model: None,
            module: None,
            microbatch: Some(self.microbatch),
            peer: None,
            request: None,
            bytes: 0,
            start,
            end,
        }
    }
}

/// Keeps the records and the usage of a rank that needs no server to run its tasks.
#[derive(Debug)]
pub struct AloneRecorder {
    ring: TraceRing,
    running: Option<Running>,
    /// Since when the step's gradients are being finished.
    ended: Option<Duration>,
    step: Usage,
    newest: Usage,
    total: Usage,
}

impl AloneRecorder {
    /// A recorder of at most so many records.
    pub fn new(capacity: usize) -> Self {
        Self {
            ring: TraceRing::new(capacity),
            running: None,
            ended: None,
            step: Usage::default(),
            newest: Usage::default(),
            total: Usage::default(),
        }
    }

    /// The first microbatch of a step begins.
    pub fn begin(&mut self, step: StepEpoch, now: Duration) {
        self.running = Some(Running {
            step,
            microbatch: MicrobatchId(0),
            since: now,
        });
        self.ended = None;
        self.step = Usage::default();
    }

    /// What ran since the last call was work of this phase. Records nothing outside a step.
    pub fn passed(&mut self, phase: Phase, now: Duration) {
        let Some(running) = &mut self.running else {
            return;
        };
        let time = now.saturating_sub(running.since);
        self.step.ran(TraceKind::Root, phase, time);
        self.ring
            .push(running.record(TraceKind::Root, phase, running.since, now));
        running.since = now;
    }

    /// A checkpointed module was computed again since `start`. Records nothing outside a step.
    pub fn recomputed(&mut self, start: Duration, now: Duration) {
        if let Some(running) = &self.running {
            let record = running.record(TraceKind::Recompute, Phase::Backward, start, now);
            self.ring.push(record);
        }
    }

    /// The microbatch is over, and the next one begins, if there is one.
    pub fn next_microbatch(&mut self, now: Duration) {
        self.passed(Phase::Forward, now);
        if let Some(running) = &mut self.running {
            running.microbatch.0 += 1;
        }
    }

    /// The step's microbatches are over.
    pub fn end(&mut self, now: Duration) {
        if self.running.take().is_some() {
            self.ended = Some(now);
        }
    }

    /// The step's gradients are finished: it has ended well.
    pub fn commit(&mut self, now: Duration) {
        if let Some(ended) = self.ended.take() {
            self.step.commit += now.saturating_sub(ended);
            self.newest = Usage::default();
            for usage in [&mut self.newest, &mut self.total] {
                usage.add(&self.step, Some(0.0));
            }
        }
    }

    /// Where the time of all steps went, and that of the newest one.
    pub fn usage(&self) -> (&Usage, &Usage) {
        (&self.total, &self.newest)
    }

    /// Keeps records from now on, or keeps none.
    pub fn keep_trace(&mut self, on: bool) {
        self.ring.switch(on);
    }

    /// The records, oldest first, and how many more were overwritten; there are none afterwards.
    pub fn take(&mut self) -> (Vec<TraceRecord>, u64) {
        self.ring.take()
    }
}
