//! Fixed-size records of what ran, waited and travelled, in a bounded ring.

use std::collections::VecDeque;
use std::time::Duration;

use shardwright_core::{MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch, WorkerId};
use shardwright_wire::{Body, Phase};

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceKind {
    /// A worker had the turn in a step function.
    Root,
    /// A worker had the turn in a requested forward.
    Forward,
    /// A worker had the turn in a requested backward.
    Backward,
    /// A worker had the turn to close a frame.
    Close,
    /// A worker had the turn for the weight gradients that a backward had left.
    WeightGradient,
    /// A worker was suspended.
    Wait,
    /// A message was handed to the transport.
    Send,
    /// A message came from the transport.
    Receive,
    /// A worker computed a checkpointed module again, while it had the turn in a backward.
    Recompute,
}

impl TraceKind {
    /// The kind's name in timelines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Close => "close",
            Self::WeightGradient => "weight",
            Self::Wait => "wait",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Recompute => "recompute",
        }
    }
}

/// One record. Times count from the server's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// The step.
    pub step: StepEpoch,
    /// What it is about.
    pub kind: TraceKind,
    /// The worker, unless the main thread or no thread of this rank did it.
    pub worker: Option<WorkerId>,
    /// Forward or backward, where that makes sense.
    pub phase: Option<Phase>,
    /// The model, where one is known.
    pub model: Option<ModelId>,
    /// The module, where one is known.
    pub module: Option<ModuleId>,
    /// The microbatch, where one is known.
    pub microbatch: Option<MicrobatchId>,
    /// The other rank of a message, or the requester of a task.
    pub peer: Option<Rank>,
    /// The request.
    pub request: Option<RequestId>,
    /// The bytes of a message's tensors.
    pub bytes: u64,
    /// When it began.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
}

/// The newest records, up to a capacity.
#[derive(Debug)]
pub(crate) struct TraceRing {
    records: VecDeque<TraceRecord>,
    capacity: usize,
    /// Whether records are kept.
    on: bool,
    lost: u64,
}

impl TraceRing {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            records: VecDeque::new(),
            capacity,
            on: false,
            lost: 0,
        }
    }

    pub(crate) fn push(&mut self, record: TraceRecord) {
        if !self.on || self.capacity == 0 {
            return;
        }
        if self.records.len() == self.capacity {
            self.records.pop_front();
            self.lost += 1;
        }
        self.records.push_back(record);
    }

    /// Keeps records from now on, or keeps none.
    pub(crate) fn switch(&mut self, on: bool) {
        self.on = on;
    }

    /// The records since the last call, and how many more there were.
    pub(crate) fn take(&mut self) -> (Vec<TraceRecord>, u64) {
        let records = std::mem::take(&mut self.records).into();
        (records, std::mem::take(&mut self.lost))
    }
}

/// The bytes of a body's tensors.
pub(crate) fn body_bytes(body: &Body) -> u64 {
    body.tensors
        .iter()
        .map(|tensor| tensor.data.len() as u64)
        .sum()
}
