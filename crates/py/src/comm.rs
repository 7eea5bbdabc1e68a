//! `CommOptions`, and the counters of routes as Python sees them.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use shardwright_comm::{CommOptions, CommStats, Transport};
use shardwright_comm::{Reason, Route, TransportChoice};
use shardwright_core::Rank;
use shardwright_system::Plan;

use crate::arguments::variable;
use crate::config::Config;
use crate::error::argument_error;

/// How a rank moves tensors: what the configuration and the environment say about it.
#[pyclass(frozen, name = "CommOptions", module = "shardwright._core")]
pub(crate) struct PyCommOptions(pub(crate) CommOptions);

#[pymethods]
impl PyCommOptions {
    /// What the configuration and the environment say, in which `SMP_DISABLE_D2D` and
    /// `SMP_D2D_GPU_BUFFER_SIZE_BYTES` are about copies from device to device; raises `ConfigError` where they make no
    /// sense. `local_size` ranks are on this host, or all where it is `one_host`.
    #[new]
    #[pyo3(signature = (config, environ, local_size, ucx_packages, *, one_host, cuda_library=None))]
    fn new(
        config: &Config,
        environ: &Bound<'_, PyAny>,
        local_size: usize,
        ucx_packages: Vec<String>,
        one_host: bool,
        cuda_library: Option<String>,
    ) -> PyResult<Self> {
        let config = &config.0;
        let mut choices = TransportChoice::ALL.into_iter();
        let transport = choices.find(|one| one.name() == config.transport);
        Ok(Self(CommOptions {
            transport: transport.expect("checked when the configuration was read"),
            one_host,
            encrypt: config.encrypt,
            spin: spin(config, local_size),
            ucx_library: config.ucx_library.clone().map(Into::into),
            ucx_packages: ucx_packages.into_iter().map(Into::into).collect(),
            device_to_device: device_to_device(environ)?,
            device_buffer_bytes: device_buffer_bytes(environ)?,
            cuda_library: cuda_library.map(Into::into),
        }))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// How long a waiting thread looks for a message before it sleeps.
///
/// To fall asleep and be woken takes longer than a short call of another rank's module, and all that runs afterwards
/// finds cold caches. Where ranks share processors, looking would take them from each other.
fn spin(config: &shardwright_core::Config, local_size: usize) -> Duration {
    let processors = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count() as usize);
    let shared = local_size > processors;
    let usual = if shared { 50 } else { 300 };
    Duration::from_micros(config.comm_spin_microseconds.map_or(usual, Into::into))
}

/// Whether there may be copies from device to device.
fn device_to_device(environ: &Bound<'_, PyAny>) -> PyResult<bool> {
    const VARIABLE: &str = "SMP_DISABLE_D2D";
    let text = variable(environ, VARIABLE).unwrap_or_default();
    match text.trim() {
        "" | "0" => Ok(true),
        "1" => Ok(false),
        other => Err(argument_error(format!(
            "the environment variable {VARIABLE} is '{other}'; allowed: 0 or 1"
        ))),
    }
}

/// The size of the device buffer out of which a rank's tensors are copied; those that find no room in it go through
/// host memory.
fn device_buffer_bytes(environ: &Bound<'_, PyAny>) -> PyResult<u64> {
    const VARIABLE: &str = "SMP_D2D_GPU_BUFFER_SIZE_BYTES";
    const DEFAULT: u64 = 256 << 20;
    // What a signed size can hold; no device has as much.
    const LARGEST: u64 = i64::MAX as u64;
    let text = variable(environ, VARIABLE).unwrap_or_default();
    let text = text.trim();
    if text.is_empty() {
        return Ok(DEFAULT);
    }
    let number = text.parse().ok().filter(|size| *size <= LARGEST);
    let all_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    number.filter(|_| all_digits).ok_or_else(|| {
        argument_error(format!(
            "the environment variable {VARIABLE} is '{text}'; allowed: an integer from 0 to {LARGEST} (bytes)"
        ))
    })
}

/// What this rank can do with the limits of its process, of which that of descriptors is raised as far as it may be:
/// the size of its persistent buffer, whether UCX, and what is missing for any job.
#[pyfunction]
pub(crate) fn means(config: &Config, world: u32, local_size: u32) -> (u64, bool, Option<String>) {
    let config = &config.0;
    let over_tcp = config.transport == TransportChoice::Tcp.name();
    let found = shardwright_system::means(Plan {
        world,
        local_size,
        groups: config.ddp,
        buffer_bytes: if over_tcp {
            0
        } else {
            config.comm_buffer_bytes
        },
    });
    let no_ucx = config.transport == TransportChoice::Ucx.name() && !found.ucx;
    let lacks = found.lacks.or_else(|| {
        no_ucx.then(|| {
            "has too few descriptors or too little address space for UCX, which transport asks for".to_owned()
        })
    });
    (found.buffer_bytes, found.ucx, lacks)
}

/// What `smp.comm_stats` shows of a transport.
pub(crate) fn comm_stats<'py>(
    py: Python<'py>,
    choice: TransportChoice,
    transport: &dyn Transport,
) -> PyResult<Bound<'py, PyDict>> {
    let stats = transport.stats();
    let dict = PyDict::new(py);
    dict.set_item("transport", choice.name())?;
    set_totals(&dict, &stats)?;
    let routes = PyDict::new(py);
    for (route, carried) in Route::ALL.into_iter().zip(stats.by_route) {
        let one = PyDict::new(py);
        one.set_item("tensors_sent", carried.tensors_sent)?;
        one.set_item("tensors_received", carried.tensors_received)?;
        one.set_item("bytes_sent", carried.bytes_sent)?;
        one.set_item("bytes_received", carried.bytes_received)?;
        routes.set_item(route.name(), one)?;
    }
    dict.set_item("routes", routes)?;
    let fallbacks = PyDict::new(py);
    for (reason, tensors) in Reason::ALL.into_iter().zip(stats.by_reason) {
        if reason.is_fallback() && tensors > 0 {
            let one = PyDict::new(py);
            one.set_item("tensors", tensors)?;
            one.set_item("because", reason.to_string())?;
            fallbacks.set_item(reason.name(), one)?;
        }
    }
    dict.set_item("fallbacks", fallbacks)?;
    let peers = PyDict::new(py);
    let own = transport.rank();
    for rank in (0..transport.world()).map(Rank).filter(|rank| *rank != own) {
        if let Some(peer) = transport.peer(rank) {
            let one = PyDict::new(py);
            one.set_item("host", &peer.host)?;
            one.set_item("reached_by", transport.reached_by(rank))?;
            one.set_item("devices", transport.devices(rank))?;
            peers.set_item(rank.0, one)?;
        }
    }
    dict.set_item("peers", peers)?;
    Ok(dict)
}

/// The totals of all routes, control parts and heartbeats included.
pub(crate) fn set_totals(dict: &Bound<'_, PyDict>, stats: &CommStats) -> PyResult<()> {
    dict.set_item("messages_sent", stats.messages_sent)?;
    dict.set_item("messages_received", stats.messages_received)?;
    dict.set_item("bytes_sent", stats.bytes_sent)?;
    dict.set_item("bytes_received", stats.bytes_received)?;
    dict.set_item("unknown_peers_dropped", stats.unknown_peers_dropped)?;
    dict.set_item("buffer_used_bytes", stats.buffer_used_bytes)?;
    dict.set_item("device_buffer_bytes", stats.device_buffer_bytes)?;
    dict.set_item("locked_bytes", stats.locked_bytes)
}
