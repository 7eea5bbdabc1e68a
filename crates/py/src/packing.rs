//! `TensorParts`: bytes copied out of torch's memory, and made into tensors again.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};
use shardwright_wire::{TensorMeta, TensorPart};

use crate::error::device_error;
use crate::raw;
use crate::tensors::{TensorParts, checked, memory};
use crate::torch_types::TorchTypes;

/// Larger copies than this let other Python threads run meanwhile.
const DETACHED_COPY_BYTES: usize = 1 << 20;

/// The items of a tuple, of which `torch.Size` is one.
fn sizes(tuple: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    tuple.cast::<PyTuple>()?.extract()
}

fn holds(tensor: &Bound<'_, PyAny>, attribute: &Bound<'_, PyString>) -> PyResult<bool> {
    tensor.getattr(attribute)?.is_truthy()
}

fn answers(tensor: &Bound<'_, PyAny>, method: &Bound<'_, PyString>) -> PyResult<bool> {
    tensor.call_method0(method)?.is_truthy()
}

/// Whether a tensor is of torch's own class, contiguous, and its elements lie in its memory alone.
pub(crate) fn is_ordinary(torch: &TorchTypes, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let kind = tensor.get_type();
    Ok((kind.is(&torch.tensor) || kind.is(&torch.parameter))
        && tensor.getattr(intern!(py, "layout"))?.is(&torch.strided)
        && !holds(tensor, intern!(py, "is_nested"))?
        && answers(tensor, intern!(py, "is_contiguous"))?)
}

/// The dtype of a tensor whose bytes can be sent as they stand in host memory.
pub(crate) fn plain_dtype(
    torch: &TorchTypes,
    tensor: &Bound<'_, PyAny>,
) -> PyResult<Option<&'static str>> {
    let py = tensor.py();
    let is_plain = is_ordinary(torch, tensor)?
        && holds(tensor, intern!(py, "is_cpu"))?
        && !answers(tensor, intern!(py, "is_conj"))?
        && !answers(tensor, intern!(py, "is_neg"))?;
    if !is_plain {
        return Ok(None);
    }
    Ok(torch.dtype_name(&tensor.getattr(intern!(py, "dtype"))?))
}

/// A copy of a dense tensor in host memory.
fn part_of(
    tensor: &Bound<'_, PyAny>,
    dtype: String,
    device: String,
    requires_grad: bool,
) -> PyResult<TensorPart> {
    let py = tensor.py();
    let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let nbytes = tensor.getattr(intern!(py, "nbytes"))?.extract()?;
    let meta = TensorMeta {
        dtype,
        shape: sizes(&tensor.getattr(intern!(py, "shape"))?)?,
        strides: sizes(&tensor.call_method0(intern!(py, "stride"))?)?,
        device,
        requires_grad,
    };
    let meta = checked(meta, nbytes)?;
    let memory = memory().unwrap_or_default();
    let data = if nbytes > DETACHED_COPY_BYTES {
        py.detach(|| raw::copy_from(address, nbytes, &memory))
    } else {
        raw::copy_from(address, nbytes, &memory)
    };
    Ok(TensorPart::new(meta, data))
}

#[pymethods]
impl TensorParts {
    /// Copies of a list of tensors, if each is of torch's own class, dense and in host memory; else None. `needs` tells
    /// which shall require a gradient at the receiver.
    #[staticmethod]
    #[pyo3(signature = (tensors: "list[torch.Tensor]", needs))]
    fn of_plain(tensors: &Bound<'_, PyList>, needs: Vec<bool>) -> PyResult<Option<Self>> {
        let torch = TorchTypes::get(tensors.py())?;
        let mut dtypes = Vec::with_capacity(needs.len());
        for tensor in tensors {
            match plain_dtype(torch, &tensor)? {
                Some(dtype) => dtypes.push(dtype),
                None => return Ok(None),
            }
        }
        let each = tensors.iter().zip(dtypes).zip(needs);
        let parts = each.map(|((tensor, dtype), need)| {
            part_of(&tensor, dtype.to_owned(), "cpu".to_owned(), need)
        });
        Ok(Some(Self::received(parts.collect::<PyResult<_>>()?)))
    }

    /// Add a copy of a dense tensor in host memory; `device` is where its receiver shall put it.
    ///
    /// Raises `ValueError` for one that is not dense.
    #[pyo3(signature = (tensor: "torch.Tensor", dtype, device, requires_grad))]
    fn append(
        &self,
        tensor: &Bound<'_, PyAny>,
        dtype: String,
        device: String,
        requires_grad: bool,
    ) -> PyResult<()> {
        let part = part_of(tensor, dtype, device, requires_grad)?;
        self.parts().push(part);
        Ok(())
    }

    /// All tensors, in host memory; each can be taken once.
    #[pyo3(signature = () -> "list[torch.Tensor]")]
    fn take_tensors<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let count = self.parts().len();
        (0..count)
            .map(|index| self.take_tensor(py, index))
            .collect()
    }

    /// A tensor in host memory, which owns its bytes: it can be taken once.
    #[pyo3(signature = (index) -> "torch.Tensor")]
    fn take_tensor<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyAny>> {
        let data = self.with(index, |part| part.data.clone())?;
        // One that a peer's device holds is copied to the host here, which may take a while, or fail.
        if data.as_lent().is_some() {
            let prepared = py.detach(|| {
                let prepared = data.prepare();
                drop(data);
                prepared
            });
            prepared.map_err(|reason| device_error(&reason))?;
        } else {
            drop(data); // to be its only owner below
        }
        let (meta, data) = self.with(index, |part| {
            (part.meta.clone(), std::mem::take(&mut part.data))
        })?;
        let meta = checked(meta, data.len())?;
        let torch = TorchTypes::get(py)?;
        if data.is_empty() {
            let shape = (meta.shape, meta.strides);
            return empty(torch, py, "empty_strided", shape, &meta.dtype);
        }
        let signed = |values: &[u64]| values.iter().map(|value| value.cast_signed()).collect();
        let from_dlpack = torch.from_dlpack.bind(py);
        if let Some(kind) = dlpack_kind(&meta.dtype) {
            let (shape, strides) = (signed(&meta.shape), signed(&meta.strides));
            return from_dlpack.call1((raw::capsule_of(py, data, kind, shape, strides)?,));
        }
        let shape = vec![data.len().cast_signed() as i64];
        let bytes = from_dlpack.call1((raw::capsule_of(py, data, BYTES, shape, vec![1])?,))?;
        let storage = bytes.call_method0(intern!(py, "untyped_storage"))?;
        // Not a view of the bytes: views of a received tensor must have that tensor as their base.
        let tensor = empty(torch, py, "empty", (0,), &meta.dtype)?;
        tensor.call_method1(intern!(py, "set_"), (storage, 0, meta.shape, meta.strides))
    }
}

/// A new tensor in host memory, made by a function of torch.
fn empty<'py>(
    torch: &TorchTypes,
    py: Python<'py>,
    function: &str,
    shape: impl pyo3::call::PyCallArgs<'py>,
    dtype: &str,
) -> PyResult<Bound<'py, PyAny>> {
    let torch = torch.module.bind(py);
    let keywords = PyDict::new(py);
    keywords.set_item("dtype", torch.getattr(dtype)?)?;
    keywords.set_item("device", "cpu")?;
    torch.getattr(function)?.call(shape, Some(&keywords))
}

/// `DLPack`'s code and bits of unsigned bytes.
const BYTES: (u8, u8) = (1, 8);

/// `DLPack`'s code and bits of a dtype; `None` where torch may not read it.
fn dlpack_kind(dtype: &str) -> Option<(u8, u8)> {
    Some(match dtype {
        "int8" => (0, 8),
        "int16" => (0, 16),
        "int32" => (0, 32),
        "int64" => (0, 64),
        "uint8" => BYTES,
        "float16" => (2, 16),
        "float32" => (2, 32),
        "float64" => (2, 64),
        "bfloat16" => (4, 16),
        "complex64" => (5, 64),
        "complex128" => (5, 128),
        "bool" => (6, 8),
        _ => return None,
    })
}
