//! `Description`: what a value is like.

use std::sync::Arc;

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use shardwright_runtime::Expected;
use shardwright_wire::AnswerKind;

use crate::answers::{is_passed_on, notes_of};
use crate::notes::ResultNotes;
use crate::tensors::{Meta, TensorParts, meta_of};
use crate::values::Spec;

/// What a value or an answer is but for its tensors' elements: its tree, what is noted of it, and each tensor's dtype, shape, strides, device and
/// whether it requires a gradient.
#[pyclass(frozen, eq, module = "shardwright._core")]
#[derive(PartialEq)]
pub(crate) struct Description(pub(crate) Arc<Expected>);

#[pymethods]
impl Description {
    /// Describe a value from its tree and tensors.
    #[new]
    fn new(spec: &Spec, parts: &TensorParts) -> Self {
        Self(Arc::new(Expected {
            kind: AnswerKind::Value,
            value: spec.0.clone(),
            tensors: parts.metas(),
        }))
    }

    /// The tree.
    #[getter]
    fn spec(&self) -> Spec {
        Spec(self.0.value.clone())
    }

    /// What is noted of a forward's result; raises `ValueError` for any other value.
    #[getter]
    fn notes(&self) -> PyResult<ResultNotes> {
        notes_of(&self.0.kind)
    }

    /// Whether it is an answer whose result went on to the next rank of a chain.
    #[getter]
    fn is_passed_on(&self) -> bool {
        is_passed_on(&self.0.kind)
    }

    /// For each tensor whether it requires a gradient.
    fn needs(&self) -> Vec<bool> {
        let tensors = self.0.tensors.iter();
        tensors.map(|meta| meta.requires_grad).collect()
    }

    /// `(dtype, shape, strides, device, requires_grad)` of a tensor.
    fn meta(&self, index: usize) -> PyResult<Meta> {
        let meta = self.0.tensors.get(index).map(meta_of);
        meta.ok_or_else(|| PyIndexError::new_err(index))
    }
}
