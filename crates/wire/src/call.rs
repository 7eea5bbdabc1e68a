//! What requests ask for, and how they are answered.

use std::sync::Arc;

use shardwright_core::{CallId, ModuleId, Rank, RequestId};

use crate::message::{Body, Phase};
use crate::notes::{ArgumentNotes, ResultNotes};
use crate::torch::TorchContext;

/// A run of consecutive children of an `nn.Sequential`: `start..end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequentialRange {
    /// First child.
    pub start: u32,
    /// One past the last child.
    pub end: u32,
}

/// What a request asks for. Clones share the call.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// Run a module forward; the request's body holds the arguments.
    Forward(Arc<ForwardCall>),
    /// Run an earlier forward's backward; the body holds the results' gradients.
    Backward(Arc<BackwardCall>),
    /// Forget an earlier forward that no gradient reached.
    Close(Arc<CloseCall>),
    /// Something for the rank's main thread outside any microbatch (the partition, say).
    Control {
        /// What it is about.
        name: String,
    },
}

/// The kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkKind {
    /// [`Work::Forward`].
    Forward,
    /// [`Work::Backward`].
    Backward,
    /// [`Work::Close`].
    Close,
    /// [`Work::Control`].
    Control,
}

impl WorkKind {
    /// Its name, for Python and for reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Close => "close",
            Self::Control => "control",
        }
    }

    /// The direction of the execution; `None` for what is no task.
    pub fn phase(self) -> Option<Phase> {
        match self {
            Self::Forward => Some(Phase::Forward),
            Self::Backward | Self::Close => Some(Phase::Backward),
            Self::Control => None,
        }
    }
}

impl Work {
    /// Its kind.
    pub fn kind(&self) -> WorkKind {
        match self {
            Self::Forward(_) => WorkKind::Forward,
            Self::Backward(_) => WorkKind::Backward,
            Self::Close(_) => WorkKind::Close,
            Self::Control { .. } => WorkKind::Control,
        }
    }

    /// The module that it is about.
    pub fn module(&self) -> Option<ModuleId> {
        match self {
            Self::Forward(call) => Some(call.module),
            Self::Backward(call) => Some(call.module),
            Self::Close(call) => Some(call.module),
            Self::Control { .. } => None,
        }
    }

    /// Of a backward or a close, the forward request.
    pub fn forward(&self) -> Option<RequestId> {
        match self {
            Self::Backward(call) => Some(call.forward),
            Self::Close(call) => Some(call.forward),
            Self::Forward(_) | Self::Control { .. } => None,
        }
    }
}

impl From<ForwardCall> for Work {
    fn from(call: ForwardCall) -> Self {
        Self::Forward(Arc::new(call))
    }
}

impl From<BackwardCall> for Work {
    fn from(call: BackwardCall) -> Self {
        Self::Backward(Arc::new(call))
    }
}

impl From<CloseCall> for Work {
    fn from(call: CloseCall) -> Self {
        Self::Close(Arc::new(call))
    }
}

/// A module's forward, or that of a range of an `nn.Sequential`. The arguments are the request's body.
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardCall {
    /// The module.
    pub module: ModuleId,
    /// The range, where the module is an `nn.Sequential`.
    pub range: Option<SequentialRange>,
    /// Where its random numbers start.
    pub seed: u64,
    /// What is noted of the arguments' tensors.
    pub notes: ArgumentNotes,
    /// The torch state that it runs under.
    pub context: TorchContext,
    /// The calls that follow, each with the result of the one before as its argument.
    pub chain: Vec<ForwardLink>,
    /// Whether the call before in a chain gave its result to the caller, who goes on from there: nothing runs.
    pub stopped: bool,
}

impl ForwardCall {
    /// A call of a whole module that says nothing beyond its arguments.
    pub fn new(module: ModuleId) -> Self {
        Self {
            module,
            range: None,
            seed: 0,
            notes: ArgumentNotes::default(),
            context: TorchContext::default(),
            chain: Vec::new(),
            stopped: false,
        }
    }

    /// The next call of the chain, to be made with this one's result as argument; `None` behind the last.
    pub fn next(&self, notes: ArgumentNotes) -> Option<(ForwardLink, Self)> {
        let (link, rest) = self.chain.split_first()?;
        let call = Self {
            module: link.module,
            range: link.range,
            seed: link.seed,
            notes,
            context: self.context.clone(),
            chain: rest.to_vec(),
            stopped: false,
        };
        Some((*link, call))
    }

    /// The next call of a chain that has ended: it runs nothing, and neither do those behind it.
    pub fn next_stopped(&self) -> Option<(ForwardLink, Self)> {
        let (link, call) = self.next(ArgumentNotes::default())?;
        let stopped = true;
        Some((link, Self { stopped, ..call }))
    }
}

/// A forward that the rank of the call before in a chain asks for, in the name of the first caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardLink {
    /// Whom to ask.
    pub rank: Rank,
    /// The request's id at the first caller, who gets the answer.
    pub request: RequestId,
    /// The module.
    pub module: ModuleId,
    /// The range, where the module is an `nn.Sequential`.
    pub range: Option<SequentialRange>,
    /// The call's number in the first caller's frame.
    pub call: CallId,
    /// Where its random numbers start.
    pub seed: u64,
}

/// Gradients: which result or argument each is of, and its number among the body's tensors.
pub type Gradients = Vec<(u32, u32)>;

/// The backward of an earlier forward. The request's body holds the gradients' tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackwardCall {
    /// The module that ran forward.
    pub module: ModuleId,
    /// The forward request.
    pub forward: RequestId,
    /// The gradients, by result.
    pub gradients: Gradients,
    /// The backwards that follow, each with the arguments' gradients of the one before.
    pub chain: Vec<BackwardLink>,
}

impl BackwardCall {
    /// A backward without gradients or a chain.
    pub fn new(module: ModuleId, forward: RequestId) -> Self {
        Self {
            module,
            forward,
            gradients: Vec::new(),
            chain: Vec::new(),
        }
    }
}

/// The end of an earlier forward that no gradient reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloseCall {
    /// The module that ran forward.
    pub module: ModuleId,
    /// The forward request.
    pub forward: RequestId,
    /// What follows, as in [`BackwardCall`]: executions may bring each other gradients by state that they share.
    pub chain: Vec<BackwardLink>,
}

impl CloseCall {
    /// A close that nothing follows.
    pub fn new(module: ModuleId, forward: RequestId) -> Self {
        Self {
            module,
            forward,
            chain: Vec::new(),
        }
    }
}

/// A backward that the rank of the one before in a chain asks for, in the name of the first caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackwardLink {
    /// Whom to ask.
    pub rank: Rank,
    /// The request's id at the first caller, who gets the answer.
    pub request: RequestId,
    /// The module.
    pub module: ModuleId,
    /// The forward request.
    pub forward: RequestId,
    /// The call's number in the first caller's frame.
    pub call: CallId,
    /// For arguments of the call before, the results of this one; `None` where they have the same numbers.
    pub results: Option<Vec<(u32, u32)>>,
}

/// The work behind a backward in its chain, given the gradients of that one's arguments: a close where there are none.
///
/// `None` behind the last.
pub fn next_backward(
    chain: &[BackwardLink],
    gradients: Gradients,
) -> Option<Result<(BackwardLink, Work), UnknownGradient>> {
    let (link, rest) = chain.split_first()?;
    let renumbered = match &link.results {
        None => Ok(gradients),
        Some(results) => gradients
            .into_iter()
            .map(|(argument, tensor)| {
                let known = results.iter().find(|(known, _)| *known == argument);
                let (_, result) = known.ok_or(UnknownGradient { argument })?;
                Ok((*result, tensor))
            })
            .collect(),
    };
    Some(renumbered.map(|gradients| {
        let (module, forward, chain) = (link.module, link.forward, rest.to_vec());
        let work = if gradients.is_empty() {
            CloseCall {
                module,
                forward,
                chain,
            }
            .into()
        } else {
            BackwardCall {
                module,
                forward,
                gradients,
                chain,
            }
            .into()
        };
        (link.clone(), work)
    }))
}

/// A gradient of an argument that is no result of the call behind in the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a gradient of argument {argument}, which is no result of the call before")]
pub struct UnknownGradient {
    /// The argument.
    pub argument: u32,
}

/// What a request was answered with.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// What it is.
    pub kind: AnswerKind,
    /// The value and the tensors.
    pub body: Body,
}

/// What an answer is.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerKind {
    /// A value: of a control request, a close, or a tensor that was asked for.
    Value,
    /// A forward's result.
    Result(Arc<ResultNotes>),
    /// Nothing: the forward's result went on to the next rank of a chain.
    Passed(Arc<ResultNotes>),
    /// Nothing: the chain had ended before this forward.
    Stopped,
    /// The gradients of a forward's arguments.
    Gradients(Gradients),
}

impl AnswerKind {
    /// Whether another answer is of the same kind and says the same, apart from what is kept.
    pub fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Result(own), Self::Result(other)) | (Self::Passed(own), Self::Passed(other)) => {
                own == other || own.is_like(other)
            }
            _ => self == other,
        }
    }

    /// What is said of the tensors.
    pub fn notes(&self) -> Option<&Arc<ResultNotes>> {
        match self {
            Self::Result(notes) | Self::Passed(notes) => Some(notes),
            Self::Value | Self::Stopped | Self::Gradients(_) => None,
        }
    }

    /// Whether all that another one, which is like it, says is kept is kept here too.
    pub fn keeps_all_of(&self, other: &Self) -> bool {
        let both = self.notes().zip(other.notes());
        both.is_none_or(|(own, other)| own.keeps_all_of(other))
    }

    /// Says that all is kept that another one, which is like it, says is kept.
    pub fn keep_all_of(&mut self, other: &Self) {
        if let (Self::Result(own) | Self::Passed(own), Some(other)) = (self, other.notes()) {
            Arc::make_mut(own).keep_all_of(other);
        }
    }
}

impl From<Body> for Answer {
    fn from(body: Body) -> Self {
        Self {
            kind: AnswerKind::Value,
            body,
        }
    }
}
