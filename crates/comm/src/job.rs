//! What a rank is told of its job, and what it brings to it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_wire::{Buffer, Limits};

use crate::rendezvous::Rendezvous;
use crate::routing::TransportChoice;
use shardwright_buffers::{Pool, SHARED_BYTES};
use shardwright_cuda::DeviceMemory;

/// The name of CUDA's driver in the system's directories.
const CUDA_LIBRARY: &str = "libcuda.so.1";

/// How a rank joins its job.
#[derive(Debug)]
pub struct JobOptions {
    /// This rank.
    pub rank: Rank,
    /// The number of ranks.
    pub world: u32,
    /// Where the ranks meet.
    pub place: Rendezvous,
    /// The interface the other ranks listen on; by default the one that leads to rank 0.
    pub bind_address: Option<IpAddr>,
    /// This host's name, for messages.
    pub host_name: String,
    /// The library's version; equal on all ranks.
    pub version: String,
    /// The configuration; equal on all ranks. Of several lines, an error shows those that differ.
    pub fingerprint: String,
    /// How long ranks may take to come.
    pub connect_timeout: Duration,
    /// How long a rank may be silent.
    pub liveness_timeout: Duration,
    /// What a message may hold.
    pub limits: Limits,
    /// How tensors move.
    pub comm: CommOptions,
    /// The size of the persistent buffer for tensors on their way to ranks of the same host; 0 for none.
    pub buffer_bytes: u64,
    /// Whether this rank has what UCX needs.
    pub ucx: bool,
    /// What this rank does not have and a job needs, in words: then no rank starts.
    pub lacks: Option<String>,
}

impl JobOptions {
    /// Those of a rank of a job of one host that shares no memory.
    pub fn on_this_host(rank: Rank, world: u32, place: Rendezvous) -> Self {
        Self {
            rank,
            world,
            place,
            bind_address: None,
            host_name: "localhost".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            fingerprint: String::new(),
            connect_timeout: Duration::from_mins(1),
            liveness_timeout: Duration::from_secs(15),
            limits: Limits::default(),
            comm: CommOptions::default(),
            buffer_bytes: 0,
            ucx: false,
            lacks: None,
        }
    }
}

/// How a rank moves tensors: what the configuration and the environment say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommOptions {
    /// Which transports may be used.
    pub transport: TransportChoice,
    /// Whether all ranks are on this host: then nothing listens where others could call.
    pub one_host: bool,
    /// Whether connections are encrypted, and nothing else leaves a host; equal on all ranks.
    pub encrypt: bool,
    /// How long a waiting thread looks again and again before it sleeps.
    pub spin: Duration,
    /// The UCX library to load; `None` to look for one.
    pub ucx_library: Option<PathBuf>,
    /// Directories of Python packages that hold UCX.
    pub ucx_packages: Vec<PathBuf>,
    /// Not set by `SMP_DISABLE_D2D`.
    pub device_to_device: bool,
    /// The size of the persistent device buffer (`SMP_D2D_GPU_BUFFER_SIZE_BYTES`).
    pub device_buffer_bytes: u64,
    /// The library of CUDA's driver to load; `None` for the system's.
    pub cuda_library: Option<PathBuf>,
}

impl Default for CommOptions {
    fn default() -> Self {
        Self {
            transport: TransportChoice::Auto,
            one_host: true,
            encrypt: false,
            spin: Duration::from_micros(50),
            ucx_library: None,
            ucx_packages: Vec::new(),
            device_to_device: true,
            device_buffer_bytes: 256 << 20,
            cuda_library: None,
        }
    }
}

/// Where a rank keeps tensors on their way.
#[derive(Clone, Debug, Default)]
pub struct TensorMemory {
    pub(crate) pool: Option<Arc<Pool>>,
    pub(crate) device: Option<Arc<DeviceMemory>>,
}

impl TensorMemory {
    pub(crate) fn of(options: &JobOptions) -> Self {
        let bytes = options.buffer_bytes;
        let pool = (bytes > 0).then(|| Pool::new(bytes)).transpose();
        let pool = pool.unwrap_or_else(|error| {
            tracing::warn!(rank = %options.rank, %error, bytes, "no memory to share with ranks of this host; tensors travel inside messages");
            None
        });
        let device = pool.as_ref().and_then(|pool| options.comm.device(pool));
        Self { pool, device }
    }

    /// A copy of a tensor's bytes, where ranks of this host reach it if there is room.
    pub fn copy_of(&self, bytes: &[u8]) -> Buffer {
        match &self.pool {
            Some(pool) if bytes.len() >= SHARED_BYTES => pool.copy_of(bytes),
            _ => Buffer::copy_of(bytes),
        }
    }

    /// This rank's device, where CUDA's driver is.
    pub fn device(&self) -> Option<&Arc<DeviceMemory>> {
        self.device.as_ref()
    }
}

impl CommOptions {
    /// What moves tensors of devices beside a persistent buffer of host memory; `None` where there is no CUDA.
    fn device(&self, pool: &Arc<Pool>) -> Option<Arc<DeviceMemory>> {
        let library = self.cuda_library.as_ref();
        let library = library.map_or(OsStr::new(CUDA_LIBRARY), |path| path.as_os_str());
        let bytes = if self.device_to_device {
            self.device_buffer_bytes
        } else {
            0
        };
        let loaded = DeviceMemory::load(library, Arc::clone(pool), bytes);
        loaded
            .inspect_err(|reason| tracing::debug!(%reason, "no CUDA"))
            .ok()
    }
}

/// What a rank brings to its job.
#[derive(Clone, Debug, Default)]
pub(crate) struct Brought {
    pub(crate) memory: TensorMemory,
    /// Where its transports are found, by their names.
    pub(crate) addresses: BTreeMap<String, Vec<u8>>,
}
