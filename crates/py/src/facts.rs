//! Facts about torch's tensors and settings that every call asks for: from Rust, because Python would spend most of a
//! call's time on asking.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::packing::is_ordinary;
use crate::raw;
use crate::torch_types::TorchTypes;

/// Functions without arguments that are called together.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Getters(Vec<Py<PyAny>>);

#[pymethods]
impl Getters {
    /// Of these functions.
    #[new]
    #[pyo3(signature = (getters: "Sequence[Callable[[], object]]"))]
    fn new(getters: Vec<Py<PyAny>>) -> Self {
        Self(getters)
    }

    /// Whether they give these values.
    #[pyo3(signature = (values: "tuple[object, ...]"))]
    fn give(&self, values: &Bound<'_, PyTuple>) -> PyResult<bool> {
        for (getter, value) in self.0.iter().zip(values) {
            let now = getter.bind(value.py()).call0()?;
            if !now.is(&value) && !now.eq(&value)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What they give, in their order.
    #[pyo3(signature = () -> "tuple[object, ...]")]
    fn __call__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let values = self.0.iter().map(|getter| getter.bind(py).call0());
        PyTuple::new(py, values.collect::<PyResult<Vec<_>>>()?)
    }
}

/// Tensors as they were, to see afterwards which were written to.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct TensorsBefore {
    tensors: Py<PyList>,
    versions: Vec<u64>,
    /// The `grad_fn` of each.
    histories: Vec<Py<PyAny>>,
}

fn history_of<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    tensor.getattr(intern!(tensor.py(), "grad_fn"))
}

fn version_of(tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
    tensor.getattr(intern!(tensor.py(), "_version"))?.extract()
}

#[pymethods]
impl TensorsBefore {
    /// Remember versions and histories of the tensors of a list.
    #[new]
    #[pyo3(signature = (tensors: "list[torch.Tensor]"))]
    fn new(tensors: Bound<'_, PyList>) -> PyResult<Self> {
        let mut versions = Vec::with_capacity(tensors.len());
        let mut histories = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            versions.push(version_of(&tensor)?);
            histories.push(history_of(&tensor)?.unbind());
        }
        Ok(Self {
            tensors: tensors.unbind(),
            versions,
            histories,
        })
    }

    /// The numbers of those that were written to.
    fn written(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let mut written = Vec::new();
        for (number, tensor) in self.tensors.bind(py).iter().enumerate() {
            if version_of(&tensor)? != self.versions[number] {
                written.push(number);
            }
        }
        Ok(written)
    }

    /// Whether nothing was done to the tensors, and results are one dense tensor that is no view and shares no memory with
    /// them.
    #[pyo3(signature = (results: "list[torch.Tensor]"))]
    fn are_unrelated_to(&self, results: &Bound<'_, PyList>) -> PyResult<bool> {
        let py = results.py();
        if results.len() != 1 || !self.written(py)?.is_empty() || self.are_reattached(py)? {
            return Ok(false);
        }
        let result = results.get_item(0)?;
        if !is_ordinary(TorchTypes::get(py)?, &result)?
            || result.call_method0(intern!(py, "_is_view"))?.is_truthy()?
        {
            return Ok(false);
        }
        let memory = address_of(&storage_of(&result)?)?;
        Ok(!memory_ids(self.tensors.bind(py))?.contains(&memory))
    }

    /// The new history of a tensor that was written to in grad mode; None where only values changed.
    #[pyo3(signature = (number) -> "torch.autograd.graph.Node | None")]
    fn rewritten<'py>(
        &self,
        py: Python<'py>,
        number: usize,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let history = history_of(&self.tensors.bind(py).get_item(number)?)?;
        let is_other = !history.is_none() && !history.is(&self.histories[number]);
        Ok(is_other.then_some(history))
    }

    /// Whether any of them requires a gradient now, or none any more, though no write has changed its history.
    fn are_reattached(&self, py: Python<'_>) -> PyResult<bool> {
        for (number, tensor) in self.tensors.bind(py).iter().enumerate() {
            let requires_grad: bool = tensor.getattr(intern!(py, "requires_grad"))?.extract()?;
            let required = !self.histories[number].is_none(py);
            if requires_grad != required && self.rewritten(py, number)?.is_none() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Tensors with the memory and the versions of those of a list, and without histories.
#[pyfunction]
#[pyo3(signature = (tensors: "list[torch.Tensor]") -> "list[torch.Tensor]")]
pub(crate) fn detached<'py>(tensors: &Bound<'py, PyList>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let method = intern!(tensors.py(), "detach");
    tensors
        .iter()
        .map(|tensor| tensor.call_method0(method))
        .collect()
}

fn storage_of<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    tensor.call_method0(intern!(tensor.py(), "untyped_storage"))
}

fn address_of(storage: &Bound<'_, PyAny>) -> PyResult<u64> {
    storage.getattr(intern!(storage.py(), "_cdata"))?.extract()
}

/// For each tensor of a list what identifies the memory behind it, while that lives.
#[pyfunction]
#[pyo3(signature = (tensors: "list[torch.Tensor]"))]
pub(crate) fn memory_ids(tensors: &Bound<'_, PyList>) -> PyResult<Vec<u64>> {
    let tensors = tensors.iter();
    tensors
        .map(|tensor| address_of(&storage_of(&tensor)?))
        .collect()
}

/// Of a list of tensors, to which nothing else refers, those whose memory something else refers to: their numbers.
///
/// `count_uses` is torch's function that tells how many tensors and Python objects have the memory of a `_cdata`;
/// `own` is how many references to its Python object there are where only this function has one.
#[pyfunction]
#[pyo3(signature = (aliases: "list[torch.Tensor]", count_uses: "Callable[[int], int]", own))]
pub(crate) fn kept_by_others(
    aliases: &Bound<'_, PyList>,
    count_uses: &Bound<'_, PyAny>,
    own: isize,
) -> PyResult<Vec<usize>> {
    let storages = aliases.iter().map(|alias| storage_of(&alias));
    let storages = storages.collect::<PyResult<Vec<_>>>()?;
    let ids = storages
        .iter()
        .map(address_of)
        .collect::<PyResult<Vec<_>>>()?;
    let mut kept = Vec::new();
    for (number, storage) in storages.iter().enumerate() {
        let same = ids.iter().filter(|id| **id == ids[number]).count();
        let uses: usize = count_uses.call1((ids[number],))?.extract()?;
        // Beside the tensors its one Python object counts.
        let references = raw::references_to(storage) - same.cast_signed();
        if uses > same + 1 || references > own {
            kept.push(number);
        }
    }
    Ok(kept)
}

/// How many references to a storage's Python object [`kept_by_others`] finds, less its own, where nothing else has one.
#[pyfunction]
#[pyo3(signature = (tensor: "torch.Tensor"))]
pub(crate) fn references_to_storage(tensor: &Bound<'_, PyAny>) -> PyResult<isize> {
    Ok(raw::references_to(&storage_of(tensor)?) - 1)
}
