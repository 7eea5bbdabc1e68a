//! Joining a job to harm it, for tests of what its members bear. Behind the feature `fuzzing`; no part of the library's
//! interface.

use std::collections::BTreeMap;
use std::sync::Arc;

use shardwright_core::Rank;

use crate::job::{Brought, JobOptions, TensorMemory};
use crate::router::Router;
use crate::start_error::StartError;
use crate::tcp;
use crate::transport::Transport;

/// A member's connections, and where the others have the transport of whose own it told.
pub type Joined = (Arc<dyn Transport>, BTreeMap<Rank, Vec<u8>>);

/// Joins with any address as that of this rank's transport of a name.
pub fn join(options: JobOptions, transport: &str, address: Vec<u8>) -> Result<Joined, StartError> {
    let brought = Brought {
        memory: TensorMemory::of(&options),
        addresses: BTreeMap::from([(transport.to_owned(), address)]),
    };
    let job = tcp::connect(options, brought, Arc::new(Router::default()), &mut || true)?;
    let addresses = job.addresses(transport);
    Ok((job, addresses))
}
