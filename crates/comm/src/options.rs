//! What the configuration and the environment say about transports and routes.

use std::path::PathBuf;
use std::time::Duration;

use crate::routing::Choice;

/// How a rank moves tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommOptions {
    /// Which transports may be used.
    pub transport: Choice,
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
}

impl Default for CommOptions {
    fn default() -> Self {
        Self {
            transport: Choice::Auto,
            spin: Duration::from_micros(50),
            ucx_library: None,
            ucx_packages: Vec::new(),
            host_buffer_bytes: 1 << 30,
            device_to_device: true,
            device_buffer_bytes: 256 << 20,
        }
    }
}
