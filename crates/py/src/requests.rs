//! `Request`: what another rank asks of this one.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardwright_core::{CallId, ModuleId, Rank, RequestId};
use shardwright_runtime::NewRequest;
use shardwright_wire::{Body, Place, SequentialRange, Value, Work, text};

use crate::server_types::split;
use crate::tensors::TensorParts;
use crate::values::Spec;

/// A request of another rank (the paper, appendix B).
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Request {
    /// All but the body, which is apart because its tensors can be taken.
    head: shardwright_wire::Request,
    spec: Py<Spec>,
    parts: Py<TensorParts>,
}

impl Request {
    pub(crate) fn new(py: Python<'_>, mut request: shardwright_wire::Request) -> PyResult<Self> {
        let empty = Body {
            value: Value::None,
            tensors: Vec::new(),
        };
        let (spec, parts) = split(py, std::mem::replace(&mut request.body, empty))?;
        Ok(Self {
            head: request,
            spec,
            parts,
        })
    }

    /// A request that follows this one, of the same model and microbatch, in the same context.
    pub(crate) fn followed_by(&self, work: Work, call: CallId, body: Body) -> NewRequest {
        NewRequest {
            model: self.head.model,
            work,
            microbatch: self.head.microbatch,
            place: Place {
                parent: self.head.place.parent,
                call,
            },
            context: self.head.context.clone(),
            hold: self.head.hold,
            expected: None,
            body,
        }
    }

    pub(crate) fn key(&self) -> (Rank, RequestId) {
        (self.head.requester, self.head.id)
    }
}

#[pymethods]
impl Request {
    /// Its id, unique at the requester.
    #[getter]
    fn id(&self) -> u64 {
        self.head.id.0
    }

    /// The global rank that asks.
    #[getter]
    fn requester(&self) -> u32 {
        self.head.requester.0
    }

    /// The step.
    #[getter]
    fn step(&self) -> u64 {
        self.head.step.0
    }

    /// `forward`, `backward`, `close` or `control`.
    #[getter]
    fn kind(&self) -> &'static str {
        work_kind(&self.head.work)
    }

    /// The model.
    #[getter]
    fn model(&self) -> u32 {
        self.head.model.0
    }

    /// The module; None for a control request.
    #[getter]
    fn module(&self) -> Option<u32> {
        match &self.head.work {
            Work::Forward { module, .. }
            | Work::Backward { module, .. }
            | Work::Close { module, .. } => Some(module.0),
            Work::Control { .. } => None,
        }
    }

    /// The children of an `nn.Sequential` to run, as `(start, end)`; None for the whole module.
    #[getter]
    fn range(&self) -> Option<(u32, u32)> {
        match &self.head.work {
            Work::Forward { range, .. } => range.map(|range| (range.start, range.end)),
            Work::Backward { .. } | Work::Close { .. } | Work::Control { .. } => None,
        }
    }

    /// For a backward or close: the id of the forward request.
    #[getter]
    fn forward(&self) -> Option<u64> {
        match &self.head.work {
            Work::Backward { forward, .. } | Work::Close { forward, .. } => Some(forward.0),
            Work::Forward { .. } | Work::Control { .. } => None,
        }
    }

    /// For a control request: what it is about.
    #[getter]
    fn control(&self) -> Option<String> {
        match &self.head.work {
            Work::Control { name } => Some(name.clone()),
            Work::Forward { .. } | Work::Backward { .. } | Work::Close { .. } => None,
        }
    }

    /// The microbatch.
    #[getter]
    fn microbatch(&self) -> u32 {
        self.head.microbatch.0
    }

    /// The request that the requester was executing; None in the step function itself.
    #[getter]
    fn parent(&self) -> Option<u64> {
        self.head.place.parent.map(|parent| parent.0)
    }

    /// The call's number in that execution.
    #[getter]
    fn call(&self) -> u32 {
        self.head.place.call.0
    }

    /// Whether gradients are enabled.
    #[getter]
    fn grad_mode(&self) -> bool {
        self.head.context.grad_mode
    }

    /// Whether inference mode is on.
    #[getter]
    fn inference_mode(&self) -> bool {
        self.head.context.inference_mode
    }

    /// Enabled autocast states: device type, dtype, cache enabled.
    #[getter]
    fn autocast(&self) -> Vec<(String, String, bool)> {
        self.head.context.autocast.clone()
    }

    /// Whether the work is to be checkpointed.
    #[getter]
    fn checkpointing(&self) -> bool {
        self.head.context.checkpointing
    }

    /// The arguments, or the gradients, without their tensors.
    #[getter]
    fn spec(&self, py: Python<'_>) -> Py<Spec> {
        self.spec.clone_ref(py)
    }

    /// Their tensors.
    #[getter]
    fn parts(&self, py: Python<'_>) -> Py<TensorParts> {
        self.parts.clone_ref(py)
    }

    /// Every field, one a line.
    fn text(&self) -> String {
        let mut whole = self.head.clone();
        whole.body = Body {
            value: self.spec.get().0.clone(),
            tensors: self.parts.get().copies(),
        };
        text::request(&whole)
    }

    fn __repr__(&self) -> String {
        format!(
            "<{} request {} of rank {}>",
            self.kind(),
            self.head.id,
            self.head.requester
        )
    }
}

pub(crate) fn work_kind(work: &Work) -> &'static str {
    match work {
        Work::Forward { .. } => "forward",
        Work::Backward { .. } => "backward",
        Work::Close { .. } => "close",
        Work::Control { .. } => "control",
    }
}

/// What a request asks for, from Python's words.
pub(crate) fn work(
    kind: &str,
    module: u32,
    range: Option<(u32, u32)>,
    forward: Option<u64>,
    control: Option<String>,
) -> PyResult<Work> {
    let module = ModuleId(module);
    let range = range.map(|(start, end)| SequentialRange { start, end });
    match (kind, forward.map(RequestId), control) {
        ("forward", None, None) => Ok(Work::Forward { module, range }),
        ("backward", Some(forward), None) if range.is_none() => {
            Ok(Work::Backward { module, forward })
        }
        ("close", Some(forward), None) if range.is_none() => Ok(Work::Close { module, forward }),
        ("control", None, Some(name)) if range.is_none() => Ok(Work::Control { name }),
        _ => Err(PyValueError::new_err(format!(
            "a request of kind {kind:?} with these arguments; allowed are \"forward\" (with a range or without), \
             \"backward\" and \"close\" (with forward), \"control\" (with control)"
        ))),
    }
}
