//! What the configuration and the environment say about transports and routes.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::buffers::Pool;
use crate::cuda::DeviceMemory;
use crate::routing::Choice;

/// How a rank moves tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommOptions {
    /// Which transports may be used.
    pub transport: Choice,
    /// Whether all ranks are on this host: then nothing listens where others could call.
    pub one_host: bool,
    /// Whether connections are encrypted, and nothing else leaves a host.
    pub encrypt: bool,
    /// How long a waiting thread looks again and again before it sleeps.
    pub spin: Duration,
    /// The UCX library to load; `None` to look for one.
    pub ucx_library: Option<PathBuf>,
    /// Directories of Python packages that hold UCX.
    pub ucx_packages: Vec<PathBuf>,
    /// The most host memory for persistent buffers.
    pub host_buffer_bytes: u64,
    /// Not set by `SMP_DISABLE_D2D`.
    pub device_to_device: bool,
    /// The size of the persistent device buffer (`SMP_D2D_GPU_BUFFER_SIZE_BYTES`).
    pub device_buffer_bytes: u64,
    /// The library of CUDA's driver to load; `None` for the system's.
    pub cuda_library: Option<PathBuf>,
}

/// The name of CUDA's driver in the system's directories.
const CUDA_LIBRARY: &str = "libcuda.so.1";

impl CommOptions {
    /// What moves tensors of devices beside a persistent buffer of host memory; `None` where there is no CUDA.
    pub fn device(&self, pool: &Arc<Pool>) -> Option<Arc<DeviceMemory>> {
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

impl Default for CommOptions {
    fn default() -> Self {
        Self {
            transport: Choice::Auto,
            one_host: true,
            encrypt: false,
            spin: Duration::from_micros(50),
            ucx_library: None,
            ucx_packages: Vec::new(),
            host_buffer_bytes: 1 << 30,
            device_to_device: true,
            device_buffer_bytes: 256 << 20,
            cuda_library: None,
        }
    }
}
