//! What of torch the extension has to know.

use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The dtypes whose elements have whole bytes; not every version of torch has all of them.
pub(crate) const DTYPES: [&str; 21] = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
];

/// The types of torch that are values, looked up once.
pub(crate) struct TorchTypes {
    pub(crate) tensor: Py<PyType>,
    pub(crate) dtype: Py<PyType>,
    pub(crate) device: Py<PyType>,
    pub(crate) size: Py<PyType>,
    pub(crate) layout: Py<PyType>,
    pub(crate) memory_format: Py<PyType>,
    pub(crate) module: Py<PyAny>,
    pub(crate) parameter: Py<PyType>,
    /// The layout of tensors with strides.
    pub(crate) strided: Py<PyAny>,
    /// Makes a tensor of a `DLPack` capsule, without checks for other objects.
    pub(crate) from_dlpack: Py<PyAny>,
    pub(crate) is_grad_enabled: Py<PyAny>,
    pub(crate) set_grad_enabled: Py<PyAny>,
    /// The names of [`DTYPES`], by the addresses of the objects, which live as long as torch.
    names: HashMap<usize, &'static str>,
}

impl TorchTypes {
    pub(crate) fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static TYPES: PyOnceLock<TorchTypes> = PyOnceLock::new();
        TYPES.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            let class = |name: &str| -> PyResult<Py<PyType>> {
                Ok(torch.getattr(name)?.cast_into::<PyType>()?.unbind())
            };
            Ok(Self {
                tensor: class("Tensor")?,
                dtype: class("dtype")?,
                device: class("device")?,
                size: class("Size")?,
                layout: class("layout")?,
                memory_format: class("memory_format")?,
                parameter: torch
                    .getattr("nn")?
                    .getattr("Parameter")?
                    .cast_into::<PyType>()?
                    .unbind(),
                strided: torch.getattr("strided")?.unbind(),
                from_dlpack: torch.getattr("_C")?.getattr("_from_dlpack")?.unbind(),
                is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
                set_grad_enabled: torch.getattr("_C")?.getattr("_set_grad_enabled")?.unbind(),
                names: DTYPES
                    .iter()
                    .filter_map(|name| Some((torch.getattr(*name).ok()?.as_ptr() as usize, *name)))
                    .collect(),
                module: torch.into_any().unbind(),
            })
        })
    }

    /// The name of a dtype whose tensors can be sent.
    pub(crate) fn dtype_name(&self, dtype: &Bound<'_, PyAny>) -> Option<&'static str> {
        self.names.get(&(dtype.as_ptr() as usize)).copied()
    }
}
