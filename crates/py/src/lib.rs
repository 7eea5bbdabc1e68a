//! The extension module `shardwright._core`; the only crate that names pyo3.

use pyo3::prelude::*;

/// Shardwright's Rust core.
#[pymodule]
mod _core {
    #[pymodule_export]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
