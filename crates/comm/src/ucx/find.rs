//! The UCX of a job.

use shardwright_ucx::{Candidates, Library, Options, WITH_TCP, WITHIN_HOST, Worker};

use crate::job::{CommOptions, JobOptions};
use crate::routing::TransportChoice;
use crate::start_error::StartError;

/// The worker of a job that goes through UCX; none where it does not.
pub(super) fn worker(job: &JobOptions) -> Result<Option<Worker>, StartError> {
    let choice = job.comm.transport;
    if !matches!(choice, TransportChoice::Auto | TransportChoice::Ucx) || job.world == 1 || !job.ucx
    {
        return Ok(None);
    }
    match (create(&job.comm, job), choice) {
        (Ok(worker), _) => Ok(Some(worker)),
        (Err(reason), TransportChoice::Ucx) => Err(StartError::System {
            what: "cannot use UCX, which \"transport\" asks for",
            reason,
        }),
        (Err(reason), _) => {
            tracing::debug!(rank = %job.rank, %reason, "messages go over TCP, without UCX");
            Ok(None)
        }
    }
}

fn create(wanted: &CommOptions, job: &JobOptions) -> Result<Worker, String> {
    let candidates = Candidates {
        configured: wanted.ucx_library.clone(),
        without_system: false,
        packages: wanted.ucx_packages.clone(),
    };
    let library = Library::find(&candidates).map_err(|error| error.to_string())?;
    if library.found().newer_than_tested {
        let version = &library.found().version;
        if wanted.transport == TransportChoice::Auto {
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
    worker.event_handle().map_err(|error| error.to_string())?;
    Ok(worker)
}

/// The transports that a job chooses from. What leaves the host unproved is used where the configuration asks for it by
/// name, and what leaves it unencrypted not where it asks for encryption.
fn transports_of(choice: TransportChoice, one_host: bool, encrypt: bool) -> &'static str {
    if choice == TransportChoice::Ucx && !one_host && !encrypt {
        WITH_TCP
    } else {
        WITHIN_HOST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_internet_socket_within_a_host_and_between_hosts_only_by_name() {
        for choice in TransportChoice::ALL {
            for (one_host, encrypt) in [(false, false), (false, true), (true, false), (true, true)]
            {
                let transports = transports_of(choice, one_host, encrypt);
                let named = |name| transports.split(',').any(|one| one == name);
                assert!(named("posix"));
                assert_eq!(
                    named("tcp"),
                    choice == TransportChoice::Ucx && !one_host && !encrypt
                );
            }
        }
    }
}
