//! The one way errors go back to Python: the exceptions of `shardwright/errors.py`.

use pyo3::PyErr;
use shardwright_checkpoint::CheckpointError;
use shardwright_comm::{CommError, Loss, StartError, describe_loss};
use shardwright_core::{ConfigError, LaunchError, Rank, TopologyError, bounded, one_line};
use shardwright_offload::OffloadError;
use shardwright_partition::PartitionError;
use shardwright_runtime::{Failure, FailureKind, ServerError};
use shardwright_system::Forked;
use shardwright_wire::ErrorReport;

mod exceptions {
    pyo3::import_exception!(shardwright.errors, ConfigError);
    pyo3::import_exception!(shardwright.errors, JobStartError);
    pyo3::import_exception!(shardwright.errors, OffloadError);
    pyo3::import_exception!(shardwright.errors, PartitionError);
    pyo3::import_exception!(shardwright.errors, CheckpointGoneError);
    pyo3::import_exception!(shardwright.errors, PeerLostError);
    pyo3::import_exception!(shardwright.errors, RemoteError);
    pyo3::import_exception!(shardwright.errors, ShardwrightError);
    pyo3::import_exception!(shardwright.errors, StallError);
    pyo3::import_exception!(shardwright.errors, StepAborted);
    pyo3::import_exception!(shardwright.errors, DepartureError);
    pyo3::import_exception!(shardwright.errors, StateOrderError);
    pyo3::import_exception!(shardwright.errors, StateWriteError);
    pyo3::import_exception!(shardwright.errors, StepMismatchError);
    pyo3::import_exception!(shardwright.errors, UnsupportedValueError);
}

/// A refused configuration.
pub(crate) fn config_error(error: &ConfigError) -> PyErr {
    exceptions::ConfigError::new_err(bounded(&error.to_string()))
}

/// An argument with a value that is not allowed.
#[expect(
    clippy::needless_pass_by_value,
    reason = "errors come as `map_err` has them"
)]
pub(crate) fn argument_error(error: impl ToString) -> PyErr {
    exceptions::ConfigError::new_err(bounded(&error.to_string()))
}

/// Ranks that cannot be arranged, or do not exist.
pub(crate) fn topology_error(error: &TopologyError) -> PyErr {
    exceptions::ConfigError::new_err(error.to_string())
}

/// A checkpoint that cannot be written, or not be read.
pub(crate) fn checkpoint_error(error: &CheckpointError) -> PyErr {
    let text = one_line(&error.to_string());
    if error.is_passing() {
        exceptions::CheckpointGoneError::new_err(text)
    } else {
        exceptions::ShardwrightError::new_err(text)
    }
}

/// A model that cannot be divided as asked.
pub(crate) fn partition_error(error: &PartitionError) -> PyErr {
    exceptions::PartitionError::new_err(error.to_string())
}

/// A value of a type that cannot cross ranks, at this path; it is the whole where the path is empty.
pub(crate) fn unsupported_value_error(path: &str, kind: &str) -> PyErr {
    let place = if path.is_empty() {
        String::new()
    } else {
        format!(" stands at {path}, and")
    };
    let text = format!(
        "a value of type {kind}{place} cannot cross ranks; pass tensors, numbers, strings and containers of them, or \
         make the type known with smp.register_type"
    );
    exceptions::UnsupportedValueError::new_err((text, kind.to_owned()))
}

/// A storage of offloaded activations that cannot be made, or does not work.
pub(crate) fn offload_error(error: &OffloadError) -> PyErr {
    exceptions::OffloadError::new_err(error.to_string())
}

/// A tensor of a device cannot cross ranks, or be read.
pub(crate) fn device_error(error: &impl ToString) -> PyErr {
    exceptions::ShardwrightError::new_err(error.to_string())
}

/// A failed step.
pub(crate) fn failure_error(failure: &Failure) -> PyErr {
    let report = &failure.report;
    let fields = || report_fields(report);
    let text = || {
        format!(
            "rank {} on host {:?}: {}",
            report.rank, report.host, report.message
        )
    };
    match failure.kind {
        FailureKind::Local | FailureKind::Remote => exceptions::RemoteError::new_err(fields()),
        FailureKind::PeerLost => exceptions::PeerLostError::new_err(fields()),
        FailureKind::Stall => exceptions::StallError::new_err(text()),
        FailureKind::Departure => exceptions::DepartureError::new_err(fields()),
        FailureKind::StateOrder => exceptions::StateOrderError::new_err(fields()),
        FailureKind::StateWrite => exceptions::StateWriteError::new_err(fields()),
        FailureKind::StepMismatch => exceptions::StepMismatchError::new_err(text()),
    }
}

/// A forked child uses what belongs to its parent.
pub(crate) fn forked_error(forked: Forked) -> PyErr {
    exceptions::ShardwrightError::new_err(forked.to_string())
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
        | ServerError::NotInPipeline { .. } => {
            exceptions::ShardwrightError::new_err(error.to_string())
        }
    }
}

/// A job that did not start.
pub(crate) fn start_error(error: &StartError) -> PyErr {
    exceptions::JobStartError::new_err(error.to_string())
}

/// A process that does not know its place in a job.
pub(crate) fn launch_error(error: &LaunchError) -> PyErr {
    exceptions::JobStartError::new_err(error.to_string())
}

/// An error between ranks of a running job; `host` knows where a rank lives.
pub(crate) fn comm_error(error: &CommError, host: impl Fn(Rank) -> String) -> PyErr {
    match error {
        CommError::PeerLost {
            rank,
            loss: Loss::Left(Some(report)),
        } => exceptions::PeerLostError::new_err((
            rank.0,
            host(*rank),
            None::<String>,
            None::<u32>,
            None::<&str>,
            report.kind.clone(),
            report.message.clone(),
            report.traceback.clone(),
        )),
        CommError::PeerLost { rank, loss } => exceptions::PeerLostError::new_err((
            rank.0,
            host(*rank),
            None::<String>,
            None::<u32>,
            None::<&str>,
            "PeerLostError",
            format!("rank {rank} {}", describe_loss(loss)),
        )),
        CommError::Interrupted { report } => {
            exceptions::RemoteError::new_err(report_fields(report))
        }
        CommError::Closed
        | CommError::NotAPeer { .. }
        | CommError::Unsendable { .. }
        | CommError::Backlog { .. }
        | CommError::Overflow { .. }
        | CommError::Timeout { .. }
        | CommError::Cancelled
        | CommError::Forked { .. } => exceptions::ShardwrightError::new_err(error.to_string()),
    }
}

type ReportFields = (
    u32,
    String,
    Option<String>,
    Option<u32>,
    Option<&'static str>,
    String,
    String,
    String,
);

fn report_fields(report: &ErrorReport) -> ReportFields {
    (
        report.rank.0,
        report.host.clone(),
        report.module.clone(),
        report.microbatch.map(|microbatch| microbatch.0),
        report.phase.map(shardwright_wire::Phase::name),
        report.kind.clone(),
        report.message.clone(),
        report.traceback.clone(),
    )
}
