//! The one way errors go back to Python: the exceptions of `shardwright/errors.py`.

use pyo3::PyErr;
use shardwright_core::{ConfigError, TopologyError};
use shardwright_partition::PartitionError;

mod exceptions {
    pyo3::import_exception!(shardwright.errors, ConfigError);
    pyo3::import_exception!(shardwright.errors, PartitionError);
    pyo3::import_exception!(shardwright.errors, UnsupportedValueError);
}

/// A refused configuration.
pub(crate) fn config_error(error: &ConfigError) -> PyErr {
    exceptions::ConfigError::new_err(error.to_string())
}

/// Ranks that cannot be arranged, or do not exist.
pub(crate) fn topology_error(error: &TopologyError) -> PyErr {
    exceptions::ConfigError::new_err(error.to_string())
}

/// A model that cannot be divided as asked.
pub(crate) fn partition_error(error: &PartitionError) -> PyErr {
    exceptions::PartitionError::new_err(error.to_string())
}

/// A value of a type that cannot cross ranks, at this path.
pub(crate) fn unsupported_value_error(path: &str, kind: &str) -> PyErr {
    exceptions::UnsupportedValueError::new_err(format!(
        "a value of type {kind} stands at {path}, and cannot cross ranks; pass tensors, numbers, strings and \
         containers of them, or make the type known with smp.register_type"
    ))
}
