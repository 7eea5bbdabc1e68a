//! The one way errors go back to Python: the exceptions of `shardwright/errors.py`.

use pyo3::PyErr;
use shardwright_core::{ConfigError, TopologyError};

mod exceptions {
    pyo3::import_exception!(shardwright.errors, ConfigError);
}

/// A refused configuration.
pub(crate) fn config_error(error: &ConfigError) -> PyErr {
    exceptions::ConfigError::new_err(error.to_string())
}

/// Ranks that cannot be arranged, or do not exist.
pub(crate) fn topology_error(error: &TopologyError) -> PyErr {
    exceptions::ConfigError::new_err(error.to_string())
}
