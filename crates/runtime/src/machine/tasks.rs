//! Tasks: what workers run.

use shardwright_core::{CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId};
use shardwright_wire::{Phase, Request, Work};

use super::dispatch::Deferred;
use crate::trace::TraceKind;

/// What a worker is to run.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// The step function of a microbatch.
    Root {
        /// The microbatch.
        microbatch: MicrobatchId,
    },
    /// A request of another rank (or of this one).
    Request(Box<Request>),
    /// Weight gradients that a backward on this rank has left for later.
    WeightGradient(Deferred),
}

impl Task {
    /// Its place in its microbatch's sequential program. Weight gradients have none: they make no requests.
    pub(super) fn path(&self) -> CallPath {
        match self {
            Self::Request(request) => request.path.clone(),
            Self::Root { .. } | Self::WeightGradient(_) => CallPath::default(),
        }
    }
}

/// What a worker's task is about, kept while the task itself is with Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CurrentTask {
    pub(super) kind: TraceKind,
    pub(super) phase: Phase,
    pub(super) microbatch: MicrobatchId,
    pub(super) request: Option<(Rank, RequestId)>,
    pub(super) model: Option<ModelId>,
    pub(super) module: Option<ModuleId>,
    /// What weight gradients are known by; 0 for other tasks.
    pub(super) token: u64,
    /// Whether a root task has reached a backward.
    pub(super) reached_backward: bool,
}

impl CurrentTask {
    pub(super) fn of(task: &Task) -> Self {
        let (kind, phase, module) = match task {
            Task::Root { .. } => (TraceKind::Root, Phase::Forward, None),
            Task::WeightGradient(deferred) => {
                (TraceKind::WeightGradient, Phase::Backward, deferred.module)
            }
            Task::Request(request) => match &request.work {
                Work::Forward(call) => (TraceKind::Forward, Phase::Forward, Some(call.module)),
                Work::Backward(call) => (TraceKind::Backward, Phase::Backward, Some(call.module)),
                Work::Close(call) => (TraceKind::Close, Phase::Backward, Some(call.module)),
                Work::Control { .. } => unreachable!("control requests go to the main thread"),
            },
        };
        match task {
            Task::Root { microbatch } => Self {
                kind,
                phase,
                microbatch: *microbatch,
                request: None,
                model: None,
                module,
                token: 0,
                reached_backward: false,
            },
            Task::WeightGradient(deferred) => Self {
                kind,
                phase,
                microbatch: deferred.microbatch,
                request: None,
                model: deferred.model,
                module,
                token: deferred.token,
                reached_backward: false,
            },
            Task::Request(request) => Self {
                kind,
                phase,
                microbatch: request.microbatch,
                request: Some((request.requester, request.id)),
                model: Some(request.model),
                module,
                token: 0,
                reached_backward: false,
            },
        }
    }
}
