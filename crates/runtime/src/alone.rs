//! When the microbatches of a pipeline of one rank ran, whose main thread runs them itself.

use std::time::Duration;

use shardwright_core::{MicrobatchId, StepEpoch};
use shardwright_wire::Phase;

use crate::trace::{TraceKind, TraceRecord, TraceRing};

/// The microbatch that the main thread runs.
#[derive(Clone, Copy, Debug)]
struct Running {
    step: StepEpoch,
    microbatch: MicrobatchId,
    since: Duration,
}

/// Keeps the newest records of a rank that needs no server to run its tasks.
#[derive(Debug)]
pub struct AloneRecorder {
    ring: TraceRing,
    running: Option<Running>,
}

impl AloneRecorder {
    /// A recorder of at most so many records.
    pub fn new(capacity: usize) -> Self {
        Self {
            ring: TraceRing::new(capacity),
            running: None,
        }
    }

    /// The first microbatch of a step begins.
    pub fn begin(&mut self, step: StepEpoch, now: Duration) {
        self.running = Some(Running {
            step,
            microbatch: MicrobatchId(0),
            since: now,
        });
    }

    /// What ran since the last call was work of this phase. Records nothing outside a step.
    pub fn passed(&mut self, phase: Phase, now: Duration) {
        let Some(running) = &mut self.running else {
            return;
        };
        self.ring.push(TraceRecord {
            step: running.step,
            kind: TraceKind::Root,
            worker: None,
            phase: Some(phase),
            model: None,
            module: None,
            microbatch: Some(running.microbatch),
            peer: None,
            request: None,
            bytes: 0,
            start: running.since,
            end: now,
        });
        running.since = now;
    }

    /// The microbatch is over, and the next one begins, if there is one.
    pub fn next_microbatch(&mut self, now: Duration) {
        self.passed(Phase::Forward, now);
        if let Some(running) = &mut self.running {
            running.microbatch.0 += 1;
        }
    }

    /// The step's microbatches are over.
    pub fn end(&mut self) {
        self.running = None;
    }

    /// The records, oldest first; there are none afterwards.
    pub fn take(&mut self) -> Vec<TraceRecord> {
        self.ring.take()
    }
}
