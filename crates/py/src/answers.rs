//! `Answer`: what a request is answered with.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardwright_runtime::Expected;
use shardwright_wire::{AnswerKind, Body, Gradients, Value};

use crate::description::Description;
use crate::notes::ResultNotes;
use crate::tensors::{Meta, TensorParts};
use crate::values::Spec;

/// The answer to a request: a forward's result, gradients, or a value.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Answer {
    kind: AnswerKind,
    spec: Py<Spec>,
    parts: Py<TensorParts>,
}

impl Answer {
    pub(crate) fn received(py: Python<'_>, answer: shardwright_wire::Answer) -> PyResult<Self> {
        Ok(Self {
            kind: answer.kind,
            spec: Py::new(py, Spec(answer.body.value))?,
            parts: Py::new(py, TensorParts::received(answer.body.tensors))?,
        })
    }

    /// The answer to be sent, whose tensors are then gone from here.
    pub(crate) fn to_wire(&self) -> shardwright_wire::Answer {
        shardwright_wire::Answer {
            kind: self.kind.clone(),
            body: Body {
                value: self.spec.get().0.clone(),
                tensors: self.parts.get().take(),
            },
        }
    }

    fn empty(py: Python<'_>, kind: AnswerKind) -> PyResult<Self> {
        Ok(Self {
            kind,
            spec: Py::new(py, Spec(Value::None))?,
            parts: Py::new(py, TensorParts::default())?,
        })
    }
}

/// What is noted of the results of an answer of this kind.
pub(crate) fn notes_of(kind: &AnswerKind) -> PyResult<ResultNotes> {
    match kind {
        AnswerKind::Result(notes) | AnswerKind::Passed(notes) => Ok(ResultNotes(Arc::clone(notes))),
        AnswerKind::Value | AnswerKind::Stopped | AnswerKind::Gradients(_) => Err(
            PyValueError::new_err("an answer without a forward's result has no notes"),
        ),
    }
}

pub(crate) fn is_passed_on(kind: &AnswerKind) -> bool {
    matches!(kind, AnswerKind::Passed(_))
}

#[pymethods]
impl Answer {
    /// Nothing: what was asked for is done.
    #[staticmethod]
    fn done(py: Python<'_>) -> PyResult<Self> {
        Self::empty(py, AnswerKind::Value)
    }

    /// A value.
    #[staticmethod]
    fn value(spec: Py<Spec>, parts: Py<TensorParts>) -> Self {
        Self {
            kind: AnswerKind::Value,
            spec,
            parts,
        }
    }

    /// A forward's result.
    #[staticmethod]
    fn result(spec: Py<Spec>, parts: Py<TensorParts>, notes: &ResultNotes) -> Self {
        Self {
            kind: AnswerKind::Result(notes.0.clone()),
            spec,
            parts,
        }
    }

    /// Nothing: the forward's result went on to the next rank of a chain.
    #[staticmethod]
    fn passed_on(py: Python<'_>, notes: &ResultNotes) -> PyResult<Self> {
        Self::empty(py, AnswerKind::Passed(notes.0.clone()))
    }

    /// Nothing: the chain had ended before this forward.
    #[staticmethod]
    fn stopped(py: Python<'_>) -> PyResult<Self> {
        Self::empty(py, AnswerKind::Stopped)
    }

    /// The gradients of a forward's arguments: for each the number of the argument and of its tensor.
    #[staticmethod]
    fn of_gradients(
        py: Python<'_>,
        gradients: Vec<(u32, u32)>,
        parts: Py<TensorParts>,
    ) -> PyResult<Self> {
        Ok(Self {
            kind: AnswerKind::Gradients(gradients),
            spec: Py::new(py, Spec(Value::None))?,
            parts,
        })
    }

    /// The value without its tensors.
    #[getter]
    fn spec(&self, py: Python<'_>) -> Py<Spec> {
        self.spec.clone_ref(py)
    }

    /// The tensors.
    #[getter]
    fn parts(&self, py: Python<'_>) -> Py<TensorParts> {
        self.parts.clone_ref(py)
    }

    /// What is noted of a forward's result; raises `ValueError` for any other answer.
    #[getter]
    fn notes(&self) -> PyResult<ResultNotes> {
        notes_of(&self.kind)
    }

    /// Whether the forward's result went on to the next rank of a chain.
    #[getter]
    fn is_passed_on(&self) -> bool {
        is_passed_on(&self.kind)
    }

    /// For each gradient the number of its argument and of its tensor; none where the answer is something else.
    #[getter]
    fn gradients(&self) -> Gradients {
        match &self.kind {
            AnswerKind::Gradients(gradients) => gradients.clone(),
            _ => Gradients::new(),
        }
    }

    /// For each tensor whether it requires a gradient.
    fn needs(&self) -> Vec<bool> {
        self.parts.get().needs()
    }

    /// `(dtype, shape, strides, device, requires_grad)` of a tensor.
    fn meta(&self, index: usize) -> PyResult<Meta> {
        self.parts.get().meta(index)
    }

    /// What the answer is but for its tensors' elements.
    fn describe(&self) -> Description {
        Description(Arc::new(Expected {
            kind: self.kind.clone(),
            value: self.spec.get().0.clone(),
            tensors: self.parts.get().metas(),
        }))
    }
}
