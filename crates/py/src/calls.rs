//! What requests ask for: `ForwardCall`, `BackwardCall`, and the links of their chains.

use std::sync::Arc;

use pyo3::prelude::*;
use shardwright_core::{CallId, MicrobatchId, ModelId, ModuleId, Rank, RequestId};
use shardwright_wire::{Gradients, SequentialRange, Work};

use crate::notes::ArgumentNotes;
use crate::torch_context::TorchContext;

pub(crate) fn range_of(range: Option<(u32, u32)>) -> Option<SequentialRange> {
    range.map(|(start, end)| SequentialRange { start, end })
}

/// Where a request is made: of which model, for which microbatch, and as which call.
#[pyclass(frozen, module = "shardwright._core")]
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) model: ModelId,
    pub(crate) microbatch: MicrobatchId,
    pub(crate) within: shardwright_wire::Place,
}

#[pymethods]
impl Place {
    /// `parent` is the request that the requester executes, None in the step function itself; `number` is the call's in
    /// that execution.
    #[new]
    #[pyo3(signature = (*, model, microbatch, parent=None, number=0))]
    fn new(model: u32, microbatch: u32, parent: Option<u64>, number: u32) -> Self {
        Self {
            model: ModelId(model),
            microbatch: MicrobatchId(microbatch),
            within: shardwright_wire::Place {
                parent: parent.map(RequestId),
                call: CallId(number),
            },
        }
    }

    /// The model.
    #[getter]
    fn model(&self) -> u32 {
        self.model.0
    }

    /// The microbatch.
    #[getter]
    fn microbatch(&self) -> u32 {
        self.microbatch.0
    }

    /// The request that the requester executes; None in the step function itself.
    #[getter]
    fn parent(&self) -> Option<u64> {
        self.within.parent.map(|parent| parent.0)
    }

    /// The call's number in that execution.
    #[getter]
    fn number(&self) -> u32 {
        self.within.call.0
    }
}

/// A module's forward on another rank, beside its arguments.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct ForwardCall(pub(crate) Arc<shardwright_wire::ForwardCall>);

#[pymethods]
impl ForwardCall {
    /// `range` are the children to run of an `nn.Sequential`, as `(start, end)`, None for the whole module; `seed` is
    /// where its random numbers start; `chain` are the calls that follow with its result.
    #[new]
    #[pyo3(signature = (module, range, *, seed, notes, context, chain=Vec::new()))]
    fn new(
        module: u32,
        range: Option<(u32, u32)>,
        seed: u64,
        notes: &ArgumentNotes,
        context: &TorchContext,
        chain: Vec<PyRef<'_, ForwardLink>>,
    ) -> Self {
        Self(Arc::new(shardwright_wire::ForwardCall {
            module: ModuleId(module),
            range: range_of(range),
            seed,
            notes: notes.0.clone(),
            context: context.0.clone(),
            chain: chain.into_iter().map(|link| link.0).collect(),
            stopped: false,
        }))
    }

    /// The module.
    #[getter]
    fn module(&self) -> u32 {
        self.0.module.0
    }

    /// The children of an `nn.Sequential` to run; None for the whole module.
    #[getter]
    fn range(&self) -> Option<(u32, u32)> {
        self.0.range.map(|range| (range.start, range.end))
    }

    /// Where its random numbers start.
    #[getter]
    fn seed(&self) -> u64 {
        self.0.seed
    }

    /// What is noted of the arguments' tensors.
    #[getter]
    fn notes(&self) -> ArgumentNotes {
        ArgumentNotes(self.0.notes.clone())
    }

    /// The torch state that it runs under.
    #[getter]
    fn context(&self) -> TorchContext {
        TorchContext(self.0.context.clone())
    }

    /// The calls that follow with its result.
    #[getter]
    fn chain(&self) -> Vec<ForwardLink> {
        self.0.chain.iter().copied().map(ForwardLink).collect()
    }

    /// Whether a call follows with its result.
    #[getter]
    fn is_followed(&self) -> bool {
        !self.0.chain.is_empty()
    }

    /// Whether the call before in a chain gave its result to the caller: nothing runs.
    #[getter]
    fn is_stopped(&self) -> bool {
        self.0.stopped
    }

    /// The next call of the chain and its link; None behind the last.
    fn next(&self, notes: &ArgumentNotes) -> Option<(ForwardLink, Self)> {
        let (link, call) = self.0.next(notes.0.clone())?;
        Some((ForwardLink(link), Self(Arc::new(call))))
    }

    /// The next call of a chain that has ended, and its link; None behind the last.
    fn next_stopped(&self) -> Option<(ForwardLink, Self)> {
        let (link, call) = self.0.next_stopped()?;
        Some((ForwardLink(link), Self(Arc::new(call))))
    }
}

/// A forward that the rank of the call before in a chain asks for, in the name of the first caller.
#[pyclass(frozen, module = "shardwright._core")]
#[derive(Clone, Copy)]
pub(crate) struct ForwardLink(pub(crate) shardwright_wire::ForwardLink);

#[pymethods]
impl ForwardLink {
    /// `rank` is to be asked, by `request`, the id at the first caller; `number` is the call's in that one's frame.
    #[new]
    #[pyo3(signature = (*, rank, request, module, range, number, seed))]
    fn new(
        rank: u32,
        request: u64,
        module: u32,
        range: Option<(u32, u32)>,
        number: u32,
        seed: u64,
    ) -> Self {
        Self(shardwright_wire::ForwardLink {
            rank: Rank(rank),
            request: RequestId(request),
            module: ModuleId(module),
            range: range_of(range),
            call: CallId(number),
            seed,
        })
    }

    /// Whom to ask.
    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank.0
    }

    /// The request's id at the first caller, who gets the answer.
    #[getter]
    fn request(&self) -> u64 {
        self.0.request.0
    }

    /// The call's number in the first caller's frame.
    #[getter]
    fn number(&self) -> u32 {
        self.0.call.0
    }
}

/// The backward of an earlier forward, or its end where no gradient reached it.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct BackwardCall {
    pub(crate) module: ModuleId,
    pub(crate) forward: RequestId,
    pub(crate) gradients: Gradients,
    pub(crate) chain: Vec<shardwright_wire::BackwardLink>,
}

impl BackwardCall {
    /// What a request asks for; None where it is no backward and no close.
    pub(crate) fn of(work: &Work) -> Option<Self> {
        match work {
            Work::Backward(call) => Some(Self {
                module: call.module,
                forward: call.forward,
                gradients: call.gradients.clone(),
                chain: call.chain.clone(),
            }),
            Work::Close(call) => Some(Self {
                module: call.module,
                forward: call.forward,
                gradients: Vec::new(),
                chain: call.chain.clone(),
            }),
            Work::Forward(_) | Work::Control { .. } => None,
        }
    }

    pub(crate) fn work(&self) -> Work {
        let (module, forward) = (self.module, self.forward);
        let chain = self.chain.clone();
        if self.gradients.is_empty() {
            let call = shardwright_wire::CloseCall {
                module,
                forward,
                chain,
            };
            return call.into();
        }
        let gradients = self.gradients.clone();
        let call = shardwright_wire::BackwardCall {
            module,
            forward,
            gradients,
            chain,
        };
        call.into()
    }
}

#[pymethods]
impl BackwardCall {
    /// `forward` is the forward request; `gradients` has for each gradient the number of its result and of its tensor;
    /// `chain` are the backwards that follow with the arguments' gradients.
    #[new]
    #[pyo3(signature = (module, forward, *, gradients, chain=Vec::new()))]
    fn new(
        module: u32,
        forward: u64,
        gradients: Vec<(u32, u32)>,
        chain: Vec<PyRef<'_, BackwardLink>>,
    ) -> Self {
        Self {
            module: ModuleId(module),
            forward: RequestId(forward),
            gradients,
            chain: chain.into_iter().map(|link| link.0.clone()).collect(),
        }
    }

    /// The module that ran forward.
    #[getter]
    fn module(&self) -> u32 {
        self.module.0
    }

    /// The forward request.
    #[getter]
    fn forward(&self) -> u64 {
        self.forward.0
    }

    /// For each gradient the number of its result and of its tensor; none where it only ends the forward.
    #[getter]
    fn gradients(&self) -> Vec<(u32, u32)> {
        self.gradients.clone()
    }

    /// Whether a backward follows with the arguments' gradients.
    #[getter]
    fn is_followed(&self) -> bool {
        !self.chain.is_empty()
    }

    /// The next backward of the chain and its link, given the arguments' gradients of this one; None behind the last.
    ///
    /// Raises `ValueError` for a gradient of an argument that is no result of the call before.
    fn next(&self, gradients: Vec<(u32, u32)>) -> PyResult<Option<(BackwardLink, Self)>> {
        let next = shardwright_wire::next_backward(&self.chain, gradients).transpose();
        let next =
            next.map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))?;
        Ok(next.and_then(|(link, work)| Some((BackwardLink(link), Self::of(&work)?))))
    }
}

/// A backward that the rank of the one before in a chain asks for, in the name of the first caller.
#[pyclass(frozen, module = "shardwright._core")]
#[derive(Clone)]
pub(crate) struct BackwardLink(pub(crate) shardwright_wire::BackwardLink);

#[pymethods]
impl BackwardLink {
    /// `results` has for arguments of the call before the results of this one; None where they have the same numbers.
    #[new]
    #[pyo3(signature = (*, rank, request, module, forward, number, results))]
    fn new(
        rank: u32,
        request: u64,
        module: u32,
        forward: u64,
        number: u32,
        results: Option<Vec<(u32, u32)>>,
    ) -> Self {
        Self(shardwright_wire::BackwardLink {
            rank: Rank(rank),
            request: RequestId(request),
            module: ModuleId(module),
            forward: RequestId(forward),
            call: CallId(number),
            results,
        })
    }

    /// Whom to ask.
    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank.0
    }

    /// The request's id at the first caller, who gets the answer.
    #[getter]
    fn request(&self) -> u64 {
        self.0.request.0
    }

    /// The call's number in the first caller's frame.
    #[getter]
    fn number(&self) -> u32 {
        self.0.call.0
    }
}
