//! Finding UCX for a job, and saying what was found.

use pyo3::prelude::*;
use shardwright_cli::UcxReport;
use shardwright_comm::routing::Choice;
use shardwright_comm::ucx::{Candidates, Library, Options, Worker, transports, transports_of};
use shardwright_comm::{CommOptions, JobOptions, StartError};

use crate::error::start_error;

/// The worker of a job that goes through UCX; none where it does not.
pub(crate) fn worker(wanted: &CommOptions, job: &JobOptions) -> PyResult<Option<Worker>> {
    if !matches!(wanted.transport, Choice::Auto | Choice::Ucx) || job.world == 1 {
        return Ok(None);
    }
    match (create(wanted, job), wanted.transport) {
        (Ok(worker), _) => Ok(Some(worker)),
        (Err(reason), Choice::Ucx) => Err(start_error(&StartError::System {
            what: "cannot use UCX, which \"transport\" asks for",
            reason,
        })),
        (Err(reason), _) => {
            tracing::debug!(rank = %job.rank, %reason, "messages go over TCP, without UCX");
            Ok(None)
        }
    }
}

fn create(wanted: &CommOptions, job: &JobOptions) -> Result<Worker, String> {
    let library = Library::find(&candidates(wanted)).map_err(|error| error.to_string())?;
    if library.found().newer_than_tested {
        let version = &library.found().version;
        if wanted.transport == Choice::Auto {
            return Err(format!(
                "UCX {version} is newer than those that were tested"
            ));
        }
        tracing::warn!(%version, "this UCX is newer than those that were tested");
    }
    let transports = transports_of(wanted.transport, wanted.one_host, wanted.encrypt);
    let options = Options {
        transports: transports.to_owned(),
        num_peers: job.world as usize - 1,
        max_payload: job.limits.tensor_bytes as usize,
        ..Options::default()
    };
    let mut worker =
        Worker::create(&library, job.rank, &options).map_err(|error| error.to_string())?;
    // What others need of it, and what it sleeps on: where either is missing, it is of no use.
    worker.address().map_err(|error| error.to_string())?;
    worker.event_fd().map_err(|error| error.to_string())?;
    Ok(worker)
}

fn candidates(wanted: &CommOptions) -> Candidates {
    Candidates {
        configured: wanted.ucx_library.clone(),
        without_system: false,
        packages: wanted.ucx_packages.clone(),
    }
}

/// What a job on this machine would find.
pub(crate) fn report(wanted: &CommOptions) -> UcxReport {
    match Library::find(&candidates(wanted)) {
        Err(error) => UcxReport::NotFound {
            looked_at: error.to_string().lines().map(str::to_owned).collect(),
        },
        Ok(library) => UcxReport::Loaded {
            path: library.found().path.display().to_string(),
            version: library.found().version.to_string(),
            tested: !library.found().newer_than_tested,
            transports: transports(&library),
        },
    }
}
