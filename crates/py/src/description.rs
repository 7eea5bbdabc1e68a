//! `Description`: what a value is like.

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use shardwright_runtime::Expected;

use crate::tensors::{Meta, TensorParts, meta_of};
use crate::values::Spec;

/// What a value is but for its tensors' elements: its tree, and each tensor's dtype, shape, strides, device and
/// whether it requires a gradient.
#[pyclass(frozen, eq, module = "shardwright._core")]
#[derive(PartialEq)]
pub(crate) struct Description(pub(crate) Expected);

#[pymethods]
impl Description {
    /// Describe a value from its tree and tensors.
    #[new]
    fn new(spec: &Spec, parts: &TensorParts) -> Self {
        Self(Expected {
            value: spec.0.clone(),
            tensors: parts.metas(),
        })
    }

    /// The tree.
    #[getter]
    fn spec(&self) -> Spec {
        Spec(self.0.value.clone())
    }

    fn __len__(&self) -> usize {
        self.0.tensors.len()
    }

    /// `(dtype, shape, strides, device, requires_grad)` of a tensor.
    fn meta(&self, index: usize) -> PyResult<Meta> {
        let meta = self.0.tensors.get(index).ok_or_else(|| {
            PyIndexError::new_err(format!("tensor {index} of {}", self.0.tensors.len()))
        })?;
        Ok(meta_of(meta))
    }
}
