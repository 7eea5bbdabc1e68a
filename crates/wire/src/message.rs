//! What ranks say to each other (the paper's appendix B, and what a job needs around it).

use shardwright_core::{CallId, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch};

use crate::tensor::TensorPart;
use crate::value::Value;

/// A value with its tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    /// The tree; its tensor leaves index `tensors`.
    pub value: Value,
    /// The tensors, each once, however often the tree names it.
    pub tensors: Vec<TensorPart>,
}

/// The direction of an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Forward.
    Forward,
    /// Backward.
    Backward,
}

/// A run of consecutive children of an `nn.Sequential`: `start..end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequentialRange {
    /// First child.
    pub start: u32,
    /// One past the last child.
    pub end: u32,
}

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Run a module forward, or only a range of an `nn.Sequential`.
    Forward {
        /// The module.
        module: ModuleId,
        /// The range, where the module is an `nn.Sequential`.
        range: Option<SequentialRange>,
    },
    /// Run an earlier forward's backward; the body holds the results' gradients.
    Backward {
        /// The module that ran forward.
        module: ModuleId,
        /// The forward request.
        forward: RequestId,
    },
    /// Forget an earlier forward that no gradient reached.
    Close {
        /// The module that ran forward.
        module: ModuleId,
        /// The forward request.
        forward: RequestId,
    },
    /// Something for the rank's main thread outside any microbatch (the partition, say).
    Control {
        /// What it is about.
        name: String,
    },
}

/// Where in the graph of executions a request was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The request that the requester was executing; `None` in the step function itself.
    pub parent: Option<RequestId>,
    /// The call's number in that execution.
    pub call: CallId,
}

/// The torch state under which the work must run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskContext {
    /// `torch.is_grad_enabled()`.
    pub grad_mode: bool,
    /// `torch.is_inference_mode_enabled()`.
    pub inference_mode: bool,
    /// Enabled autocast states: device type, dtype, cache enabled.
    pub autocast: Vec<(String, String, bool)>,
    /// Whether the work is to be checkpointed.
    pub checkpointing: bool,
}

/// A request to execute something.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Its id, unique at the requester.
    pub id: RequestId,
    /// The step it belongs to.
    pub step: StepEpoch,
    /// The model.
    pub model: ModelId,
    /// What is asked for.
    pub work: Work,
    /// The microbatch.
    pub microbatch: MicrobatchId,
    /// Who asks.
    pub requester: Rank,
    /// Where in the graph.
    pub place: Place,
    /// Under which torch state.
    pub context: TaskContext,
    /// Arguments, or gradients.
    pub body: Body,
}

/// What an error was, and where; enough to raise it anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorReport {
    /// The rank that failed.
    pub rank: Rank,
    /// Its host.
    pub host: String,
    /// The module, when one was running.
    pub module: Option<String>,
    /// The microbatch, when one was running.
    pub microbatch: Option<MicrobatchId>,
    /// The phase, when a task was running.
    pub phase: Option<Phase>,
    /// The exception's type.
    pub kind: String,
    /// The exception's text.
    pub message: String,
    /// The original traceback, as text.
    pub traceback: String,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// With results, or input gradients.
    Value(Body),
    /// With an error. (A failed step also travels as [`Abort`].)
    Failed(ErrorReport),
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Response {
    /// The request.
    pub id: RequestId,
    /// The step it belongs to.
    pub step: StepEpoch,
    /// Who answers.
    pub responder: Rank,
    /// How it ended.
    pub outcome: Outcome,
}

/// The pipeline's root enters a step; its peers compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepBegin {
    /// The step.
    pub step: StepEpoch,
    /// The step function's qualified name.
    pub function: String,
    /// How many microbatches.
    pub num_microbatches: u32,
}

/// The pipeline's root has finished a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepEnd {
    /// The step.
    pub step: StepEpoch,
    /// What the step function returned, for every rank of the replica.
    pub body: Body,
}

/// A step failed somewhere; it ends everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abort {
    /// The step.
    pub step: StepEpoch,
    /// Why.
    pub error: ErrorReport,
}

/// An object of `smp.send` and its like.
#[derive(Clone, Debug, PartialEq)]
pub struct ObjectMessage {
    /// Keeps independent conversations apart; first in, first out within one.
    pub channel: String,
    /// The object.
    pub body: Body,
}

/// Everything that a rank may send to another.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// Execute something.
    Request(Box<Request>),
    /// An answer.
    Response(Box<Response>),
    /// A step begins.
    StepBegin(StepBegin),
    /// A step ends.
    StepEnd(Box<StepEnd>),
    /// A step fails.
    Abort(Box<Abort>),
    /// An object.
    Object(Box<ObjectMessage>),
    /// The sender leaves in good order; nothing follows.
    Goodbye(Option<Box<ErrorReport>>),
}

impl Message {
    /// The value that it carries, if it is of a kind that does.
    pub fn body(&self) -> Option<&Body> {
        match self {
            Self::Request(request) => Some(&request.body),
            Self::Response(response) => match &response.outcome {
                Outcome::Value(body) => Some(body),
                Outcome::Failed(_) => None,
            },
            Self::StepEnd(end) => Some(&end.body),
            Self::Object(object) => Some(&object.body),
            Self::StepBegin(_) | Self::Abort(_) | Self::Goodbye(_) => None,
        }
    }

    /// The same, to be changed.
    pub fn body_mut(&mut self) -> Option<&mut Body> {
        match self {
            Self::Request(request) => Some(&mut request.body),
            Self::Response(response) => match &mut response.outcome {
                Outcome::Value(body) => Some(body),
                Outcome::Failed(_) => None,
            },
            Self::StepEnd(end) => Some(&mut end.body),
            Self::Object(object) => Some(&mut object.body),
            Self::StepBegin(_) | Self::Abort(_) | Self::Goodbye(_) => None,
        }
    }
}
