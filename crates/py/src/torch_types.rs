//! What of torch the extension has to know.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The types of torch that are values, looked up once.
pub(crate) struct TorchTypes {
    pub(crate) tensor: Py<PyType>,
    pub(crate) dtype: Py<PyType>,
    pub(crate) device: Py<PyType>,
    pub(crate) size: Py<PyType>,
    pub(crate) layout: Py<PyType>,
    pub(crate) memory_format: Py<PyType>,
    pub(crate) module: Py<PyAny>,
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
                module: torch.into_any().unbind(),
            })
        })
    }
}
