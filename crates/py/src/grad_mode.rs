//! `GradMode`: torch's grad mode for a block.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::torch_types::TorchTypes;

/// Sets torch's grad mode for a block; one block for each object.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct GradMode {
    mode: bool,
    before: AtomicBool,
}

fn is_enabled(py: Python<'_>, torch: &TorchTypes) -> PyResult<bool> {
    torch.is_grad_enabled.bind(py).call0()?.is_truthy()
}

fn set(py: Python<'_>, torch: &TorchTypes, mode: bool) -> PyResult<()> {
    torch.set_grad_enabled.bind(py).call1((mode,))?;
    Ok(())
}

#[pymethods]
impl GradMode {
    /// For a block with this mode.
    #[new]
    fn new(mode: bool) -> Self {
        Self {
            mode,
            before: AtomicBool::new(mode),
        }
    }

    /// Set it.
    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        let torch = TorchTypes::get(py)?;
        let before = is_enabled(py, torch)?;
        self.before.store(before, Ordering::Relaxed);
        if before == self.mode {
            return Ok(());
        }
        set(py, torch, self.mode)
    }

    /// Restore the mode of before, also where the block has changed it.
    #[pyo3(signature = (*_raised: "object"))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        let torch = TorchTypes::get(py)?;
        let before = self.before.load(Ordering::Relaxed);
        if is_enabled(py, torch)? == before {
            return Ok(());
        }
        set(py, torch, before)
    }
}
