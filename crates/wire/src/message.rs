//! What ranks say to each other (the paper's appendix B, and what a job needs around it).

pub use shardwright_core::Phase;
use shardwright_core::{
    CallId, CallPath, MicrobatchId, ModelId, ModuleId, Rank, RequestId, StepEpoch,
};

use crate::call::{Answer, Work};
use crate::tensor::{HeldTensor, TensorPart};
use crate::value::Value;

/// A value with its tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    /// The tree; its tensor leaves index `tensors`.
    pub value: Value,
    /// The tensors, each once, however often the tree names it.
    pub tensors: Vec<TensorPart>,
}

/// Where in the graph of executions a request was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The request that the requester was executing; `None` in the step function itself.
    pub parent: Option<RequestId>,
    /// The call's number in that execution.
    pub call: CallId,
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
    /// Where in the microbatch's sequential program.
    pub path: CallPath,
    /// Whether the results' tensors stay where they are made until somebody asks for them.
    pub hold: bool,
    /// Earlier requests of the sender, of whose held results it needs nothing more.
    pub released: Vec<RequestId>,
    /// Arguments, or gradients' tensors.
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
pub enum ResponseOutcome {
    /// With results, or input gradients.
    Value(Answer),
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
    pub outcome: ResponseOutcome,
}

/// A held tensor is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// The step it belongs to.
    pub step: StepEpoch,
    /// The tensor, which the receiver holds or will hold.
    pub tensor: HeldTensor,
    /// The rank to send it to.
    pub to: Rank,
    /// Who made the request that it is an argument of; with `to` the same, the fetch itself is its request.
    pub requester: Rank,
    /// That request.
    pub request: RequestId,
    /// Which of that request's tensors it is.
    pub index: u32,
}

/// A held tensor, sent to who has been named in a [`Fetch`].
#[derive(Clone, Debug, PartialEq)]
pub struct Delivery {
    /// The step it belongs to.
    pub step: StepEpoch,
    /// Who made the request that it is an argument of.
    pub requester: Rank,
    /// That request.
    pub request: RequestId,
    /// Which of that request's tensors it is.
    pub index: u32,
    /// The tensor.
    pub body: Body,
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
    /// Whether they run one after another, whatever the schedule.
    pub one_at_a_time: bool,
}

/// The root says that all forwards of a microbatch have been executed, on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardOver {
    /// The step it belongs to.
    pub step: StepEpoch,
    /// The microbatch.
    pub microbatch: MicrobatchId,
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

/// What the first rank of a tensor-parallel group has done: the others follow, so that collectives inside modules have
/// one order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskOrder {
    /// The step it belongs to.
    pub step: StepEpoch,
    /// Its place among the messages of this kind in the step, from 0; one may overtake another.
    pub number: u64,
    /// What happened, in order.
    pub events: Vec<TaskEvent>,
}

/// What happened to a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TaskEvent {
    /// It has the turn, for the first time or again.
    Turn(TaskName),
    /// It asks another rank for something.
    Asks(Asked),
    /// It enters a collective of the group, for something of this name.
    Enters(String),
    /// A task leaves weight gradients for later, under this name.
    Defers(TaskName),
    /// It is over.
    Ends(TaskName),
}

/// A task by names that are the same on all ranks of a tensor-parallel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskName {
    /// Where it comes from.
    pub source: TaskSource,
    /// Forward or backward.
    pub phase: Phase,
    /// Its microbatch.
    pub microbatch: MicrobatchId,
    /// Its model and module; `None` in the step function.
    pub module: Option<(ModelId, ModuleId)>,
}

/// Where a task comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskSource {
    /// It is the step function.
    Root,
    /// A rank has asked for it.
    Request {
        /// That rank's place in its pipeline.
        place: u32,
        /// Which of its requests.
        id: RequestId,
    },
    /// A backward has left weight gradients.
    WeightGradient {
        /// How many had been left before on its rank in this step.
        token: u64,
    },
}

/// What a task asks another rank for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// That rank's place in the pipeline.
    pub place: u32,
    /// Forward or backward; `None` for what is no task.
    pub phase: Option<Phase>,
    /// For which microbatch.
    pub microbatch: MicrobatchId,
    /// The model, and its module where it is about one.
    pub module: (ModelId, Option<ModuleId>),
    /// Whether it takes the answer to be as in earlier steps, and goes on before it is there.
    pub is_predicted: bool,
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
    /// A tensor of an answer is wanted.
    Fetch(Fetch),
    /// A tensor of an answer.
    Delivery(Box<Delivery>),
    /// A step begins.
    StepBegin(StepBegin),
    /// A step ends.
    StepEnd(Box<StepEnd>),
    /// A step fails.
    Abort(Box<Abort>),
    /// An object.
    Object(Box<ObjectMessage>),
    /// The tasks of the first rank of a tensor-parallel group.
    TaskOrder(Box<TaskOrder>),
    /// A microbatch's forwards are over.
    ForwardOver(ForwardOver),
    /// The sender leaves in good order; nothing follows.
    ShutdownNotice(Option<Box<ErrorReport>>),
}

impl Message {
    /// The value that it carries, if it is of a kind that does.
    pub fn body(&self) -> Option<&Body> {
        match self {
            Self::Request(request) => Some(&request.body),
            Self::Response(response) => match &response.outcome {
                ResponseOutcome::Value(answer) => Some(&answer.body),
                ResponseOutcome::Failed(_) => None,
            },
            Self::StepEnd(end) => Some(&end.body),
            Self::Object(object) => Some(&object.body),
            Self::Delivery(delivery) => Some(&delivery.body),
            Self::Fetch(_)
            | Self::StepBegin(_)
            | Self::Abort(_)
            | Self::TaskOrder(_)
            | Self::ForwardOver(_)
            | Self::ShutdownNotice(_) => None,
        }
    }

    /// The same, to be changed.
    pub fn body_mut(&mut self) -> Option<&mut Body> {
        match self {
            Self::Request(request) => Some(&mut request.body),
            Self::Response(response) => match &mut response.outcome {
                ResponseOutcome::Value(answer) => Some(&mut answer.body),
                ResponseOutcome::Failed(_) => None,
            },
            Self::StepEnd(end) => Some(&mut end.body),
            Self::Object(object) => Some(&mut object.body),
            Self::Delivery(delivery) => Some(&mut delivery.body),
            Self::Fetch(_)
            | Self::StepBegin(_)
            | Self::Abort(_)
            | Self::TaskOrder(_)
            | Self::ForwardOver(_)
            | Self::ShutdownNotice(_) => None,
        }
    }
}
