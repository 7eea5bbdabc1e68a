//! TCP jobs whose ranks are threads of a test.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::Duration;

use shardwright_core::Rank;

use super::address::Listener;
use super::dial::Cancel;
use super::rendezvous::{connect, start};
use super::transport::{Connected, Tcp};
use crate::job::{Brought, JobOptions, TensorMemory};
use crate::rendezvous::Rendezvous;
use crate::secret::Secret;
use crate::start_error::StartError;
use crate::transport::Receiver;

fn secret() -> Secret {
    Secret::new(b"the secret of the tests".to_vec()).unwrap()
}

/// The options of a rank of a job on this host.
pub(crate) fn options(rank: u32, world: u32, port: u16) -> JobOptions {
    let place = Rendezvous::at("127.0.0.1".to_owned(), port, secret());
    JobOptions {
        host_name: format!("host-{rank}"),
        version: "0.1.0".to_owned(),
        fingerprint: "seed=1".to_owned(),
        connect_timeout: Duration::from_secs(20),
        ucx: true,
        ..JobOptions::on_this_host(Rank(rank), world, place)
    }
}

/// Options for all ranks; rank 0 has its listener already.
pub(crate) fn all_options(world: u32) -> Vec<JobOptions> {
    let listener = Listener::bind("127.0.0.1", 0).unwrap();
    let port = listener.port();
    let mut all: Vec<JobOptions> = (0..world).map(|rank| options(rank, world, port)).collect();
    all[0].place.listener = Some(listener);
    all
}

/// What a rank brings that has no transport above TCP.
fn brought(options: &JobOptions) -> Brought {
    Brought {
        memory: TensorMemory::of(options),
        ..Brought::default()
    }
}

/// Joins in a thread.
pub(crate) fn join(
    options: JobOptions,
    receiver: Arc<dyn Receiver>,
) -> JoinHandle<Result<Arc<Tcp>, StartError>> {
    let name = format!("test-rank-{}", options.rank);
    let thread = std::thread::Builder::new().name(name);
    thread
        .spawn(move || {
            let brought = brought(&options);
            connect(options, brought, receiver, &mut || true)
        })
        .unwrap()
}

/// A rank without threads; dropping it is its death.
pub(crate) struct Frozen {
    connected: Connected,
}

impl Frozen {
    /// Puts bytes on the wire to a peer, as somebody between the two may.
    pub(crate) fn inject(&self, to: Rank, bytes: &[u8]) {
        let mut socket = self.connected.connections[&to].socket();
        std::io::Write::write_all(&mut socket, bytes).unwrap();
    }

    /// Writes bytes to a peer, where a frame is due.
    pub(crate) fn write(&self, to: Rank, bytes: &[u8]) {
        let connection = &self.connected.connections[&to];
        let mut pieces = [IoSlice::new(bytes)];
        let written = AtomicU64::new(0);
        connection.write_pieces(&mut pieces, &written).unwrap();
    }
}

/// Joins in a thread, and then neither reads nor writes: a frozen process.
pub(crate) fn join_frozen(options: JobOptions) -> JoinHandle<Result<Frozen, StartError>> {
    let thread = std::thread::Builder::new().name("test-frozen".to_owned());
    thread
        .spawn(move || {
            let brought = brought(&options);
            let connected = start(options, &brought, &Cancel::default())?;
            Ok(Frozen { connected })
        })
        .unwrap()
}
