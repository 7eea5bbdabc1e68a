//! The one way errors go back to Python: the exceptions of `shardwright/errors.py`.

use pyo3::PyErr;
use shardwright_core::{ConfigError, TopologyError};
use shardwright_partition::PartitionError;
use shardwright_runtime::{Failure, FailureKind, ServerError};

use crate::server_types::phase_name;

mod exceptions {
    pyo3::import_exception!(shardwright.errors, ConfigError);
    pyo3::import_exception!(shardwright.errors, PartitionError);
    pyo3::import_exception!(shardwright.errors, PeerLostError);
    pyo3::import_exception!(shardwright.errors, RemoteError);
    pyo3::import_exception!(shardwright.errors, ShardwrightError);
    pyo3::import_exception!(shardwright.errors, StallError);
    pyo3::import_exception!(shardwright.errors, StepAborted);
    pyo3::import_exception!(shardwright.errors, StepMismatchError);
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

/// A failed step.
pub(crate) fn failure_error(failure: &Failure) -> PyErr {
    let report = &failure.report;
    let fields = || {
        (
            report.rank.0,
            report.host.clone(),
            report.module.clone(),
            report.microbatch.map(|microbatch| microbatch.0),
            report.phase.map(phase_name),
            report.kind.clone(),
            report.message.clone(),
            report.traceback.clone(),
        )
    };
    let text = || format!("rank {} on host {:?}: {}", report.rank, report.host, report.message);
    match failure.kind {
        FailureKind::Local | FailureKind::Remote => exceptions::RemoteError::new_err(fields()),
        FailureKind::PeerLost => exceptions::PeerLostError::new_err(fields()),
        FailureKind::Stall => exceptions::StallError::new_err(text()),
        FailureKind::StepMismatch => exceptions::StepMismatchError::new_err(text()),
    }
}

/// A call of the execution server that did not do what it says.
pub(crate) fn server_error(error: &ServerError) -> PyErr {
    match error {
        ServerError::Aborted => exceptions::StepAborted::new_err(error.to_string()),
        ServerError::Failed(failure) => failure_error(failure),
        ServerError::NotInStep { .. }
        | ServerError::InStep { .. }
        | ServerError::StaleStep { .. }
        | ServerError::NoMicrobatches { .. }
        | ServerError::UnknownWorker { .. }
        | ServerError::NotExecuting { .. }
        | ServerError::NotARootTask { .. }
        | ServerError::UnknownRequest { .. }
        | ServerError::NotServed { .. }
        | ServerError::NotRoot { .. }
        | ServerError::NotInPipeline { .. } => exceptions::ShardwrightError::new_err(error.to_string()),
    }
}
