//! When tensors went out and came back, for timelines.

use std::collections::VecDeque;
use std::time::Duration;

use shardwright_core::{MicrobatchId, StepEpoch};

/// Some hundred steps.
const CAPACITY: usize = 1 << 16;

/// Which way a tensor went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the storage.
    Out,
    /// Back to memory.
    In,
}

/// One transfer. Times count from the start of the thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The step.
    pub step: StepEpoch,
    /// Which way.
    pub direction: Direction,
    /// The microbatch whose call kept it first.
    pub microbatch: MicrobatchId,
    /// The module that was called.
    pub module: String,
    /// Its bytes.
    pub bytes: u64,
    /// When it began.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
}

/// The newest spans.
#[derive(Debug, Default)]
pub(crate) struct Spans {
    newest: VecDeque<Span>,
    on: bool,
    lost: u64,
}

impl Spans {
    pub(crate) fn switch(&mut self, on: bool) {
        self.on = on;
    }

    pub(crate) fn push(&mut self, span: impl FnOnce() -> Span) {
        if !self.on {
            return;
        }
        if self.newest.len() == CAPACITY {
            self.newest.pop_front();
            self.lost += 1;
        }
        self.newest.push_back(span());
    }

    /// The spans since the last call, and how many more there were.
    pub(crate) fn take(&mut self) -> (Vec<Span>, u64) {
        let newest = std::mem::take(&mut self.newest).into();
        (newest, std::mem::take(&mut self.lost))
    }
}
