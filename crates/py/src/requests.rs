//! `Request`: what another rank asks of this one.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardwright_core::{CallId, Rank, RequestId};
use shardwright_runtime::NewRequest;
use shardwright_wire::{Body, Place, Value, Work, text};

use crate::calls::{BackwardCall, ForwardCall};
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

    /// A request of a chain, in the name of this one's requester.
    pub(crate) fn followed_by(&self, work: Work, call: CallId, body: Body) -> NewRequest {
        NewRequest {
            model: self.head.model,
            work,
            microbatch: self.head.microbatch,
            place: Place {
                parent: self.head.place.parent,
                call,
            },
            hold: self.head.hold,
            expected: None,
            body,
        }
    }

    fn is_other(&self, wanted: &str) -> PyErr {
        PyValueError::new_err(format!("{} is not {wanted}", self.__repr__()))
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

    /// The model.
    #[getter]
    fn model(&self) -> u32 {
        self.head.model.0
    }

    /// The module; raises `ValueError` for a control request.
    #[getter]
    fn module(&self) -> PyResult<u32> {
        let module = self.head.work.module();
        let module = module.ok_or_else(|| self.is_other("about a module"))?;
        Ok(module.0)
    }

    /// What a forward request asks for; raises `ValueError` for any other request.
    #[getter]
    fn forward(&self) -> PyResult<ForwardCall> {
        match &self.head.work {
            Work::Forward(call) => Ok(ForwardCall(Arc::clone(call))),
            _ => Err(self.is_other("a forward")),
        }
    }

    /// What a backward request asks for, or one that ends a forward; raises `ValueError` for any other request.
    #[getter]
    fn backward(&self) -> PyResult<BackwardCall> {
        BackwardCall::of(&self.head.work).ok_or_else(|| self.is_other("a backward"))
    }

    /// For a control request: what it is about.
    #[getter]
    fn control(&self) -> Option<String> {
        match &self.head.work {
            Work::Control { name } => Some(name.clone()),
            Work::Forward(_) | Work::Backward(_) | Work::Close(_) => None,
        }
    }

    /// The microbatch.
    #[getter]
    fn microbatch(&self) -> u32 {
        self.head.microbatch.0
    }

    /// The arguments, or a control request's value, without their tensors.
    #[getter]
    fn spec(&self, py: Python<'_>) -> Py<Spec> {
        self.spec.clone_ref(py)
    }

    /// The tensors of the arguments or of the gradients.
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
            self.head.work.kind().name(),
            self.head.id,
            self.head.requester
        )
    }
}
