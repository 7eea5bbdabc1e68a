//! One record of a timeline.

use serde::{Deserialize, Serialize};
pub use shardwright_core::Phase;

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordKind {
    /// The step function.
    Root,
    /// A requested forward.
    Forward,
    /// A requested backward, or the part of one that makes the gradients of inputs.
    Backward,
    /// The part of a backward that makes the gradients of weights, run apart.
    Weight,
    /// The end of a frame without backward.
    Close,
    /// A suspended worker.
    Wait,
    /// A message on its way, at its sender.
    Send,
    /// A message that has come.
    Receive,
    /// A checkpointed module is computed again, inside a backward.
    Recompute,
    /// An offloaded activation on its way to the storage.
    Offload,
    /// An offloaded activation on its way back.
    Load,
}

impl RecordKind {
    /// Every kind.
    pub const ALL: [Self; 11] = [
        Self::Root,
        Self::Forward,
        Self::Backward,
        Self::Weight,
        Self::Close,
        Self::Wait,
        Self::Send,
        Self::Receive,
        Self::Recompute,
        Self::Offload,
        Self::Load,
    ];

    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Weight => "weight",
            Self::Close => "close",
            Self::Wait => "wait",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Recompute => "recompute",
            Self::Offload => "offload",
            Self::Load => "load",
        }
    }

    /// The kind of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// What an interval was spent on: its colour on pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Activity {
    /// Forward work.
    Forward,
    /// Backward work.
    Backward,
    /// Gradients of weights.
    Weight,
    /// Other tasks.
    Other,
    /// A worker waits.
    Wait,
    /// A message is under way.
    Transfer,
    /// A part of a backward: a checkpointed module is computed again.
    Recompute,
    /// An offloaded activation is under way.
    Offload,
}

impl Activity {
    /// Its name on pictures and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Weight => "weight",
            Self::Other => "other",
            Self::Wait => "wait",
            Self::Transfer => "transfer",
            Self::Recompute => "recompute",
            Self::Offload => "offload",
        }
    }

    /// Whether it is a task, in which the rank computes. A second computation is inside one.
    pub fn is_busy(self) -> bool {
        match self {
            Self::Forward | Self::Backward | Self::Weight | Self::Other => true,
            Self::Wait | Self::Transfer | Self::Recompute | Self::Offload => false,
        }
    }
}

/// What one rank did over one interval. Times are nanoseconds on a clock that all ranks share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The global rank.
    pub rank: u32,
    /// The step, counted from the start of the job.
    pub step: u64,
    /// What it is about.
    pub kind: RecordKind,
    /// When it began.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// Forward or backward, where that makes sense.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The worker, unless no worker did it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u32>,
    /// The module's global name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    /// The microbatch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microbatch: Option<u32>,
    /// The other rank of a message, or the requester of a task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<u32>,
    /// The request, unique at its requester.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<u64>,
    /// The bytes of a message's tensors, or of an offloaded one.
    #[serde(default)]
    pub bytes: u64,
}

impl Record {
    /// A record with nothing but its place, at time zero.
    pub fn new(rank: u32, step: u64, kind: RecordKind) -> Self {
        Self {
            rank,
            step,
            kind,
            start_ns: 0,
            end_ns: 0,
            phase: None,
            worker: None,
            module: None,
            microbatch: None,
            peer: None,
            request: None,
            bytes: 0,
        }
    }

    /// What its interval was spent on.
    pub fn activity(&self) -> Activity {
        match (self.kind, self.phase) {
            (RecordKind::Root, Some(Phase::Backward)) | (RecordKind::Backward, _) => {
                Activity::Backward
            }
            (RecordKind::Root | RecordKind::Forward, _) => Activity::Forward,
            (RecordKind::Weight, _) => Activity::Weight,
            (RecordKind::Close, _) => Activity::Other,
            (RecordKind::Wait, _) => Activity::Wait,
            (RecordKind::Send | RecordKind::Receive, _) => Activity::Transfer,
            (RecordKind::Recompute, _) => Activity::Recompute,
            (RecordKind::Offload | RecordKind::Load, _) => Activity::Offload,
        }
    }

    /// Its name on pictures.
    pub fn label(&self) -> String {
        match (self.kind, self.peer, self.module.as_deref()) {
            (RecordKind::Send, Some(peer), _) => format!("send to rank {peer}"),
            (RecordKind::Receive, Some(peer), _) => format!("receive from rank {peer}"),
            (RecordKind::Send | RecordKind::Receive, None, _) => self.kind.name().to_owned(),
            (RecordKind::Wait, _, Some(module)) => format!("wait in {module}"),
            (
                kind @ (RecordKind::Recompute | RecordKind::Offload | RecordKind::Load),
                _,
                Some(module),
            ) => format!("{} {module}", kind.name()),
            (RecordKind::Root, _, None) => "step function".to_owned(),
            (_, _, Some(module)) => module.to_owned(),
            (_, _, None) => self.kind.name().to_owned(),
        }
    }

    /// How long it took.
    pub fn length_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }
}
