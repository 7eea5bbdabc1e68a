//! `CommOptions`, and the counters of routes as Python sees them.

use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use shardwright_comm::{CommOptions, CommStats, Transport};
use shardwright_comm::{Reason, Route, TransportChoice};
use shardwright_core::Rank;

/// How a rank moves tensors: what the configuration and the environment say about it.
#[pyclass(frozen, name = "CommOptions", module = "shardwright._core")]
pub(crate) struct PyCommOptions(pub(crate) CommOptions);

#[pymethods]
impl PyCommOptions {
    #[new]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword-only, each its own setting"
    )]
    #[pyo3(signature = (*, transport, one_host, encrypt, spin_microseconds, ucx_library, ucx_packages,
                        device_to_device, device_buffer_bytes, cuda_library=None))]
    fn new(
        transport: &str,
        one_host: bool,
        encrypt: bool,
        spin_microseconds: u64,
        ucx_library: Option<String>,
        ucx_packages: Vec<String>,
        device_to_device: bool,
        device_buffer_bytes: u64,
        cuda_library: Option<String>,
    ) -> PyResult<Self> {
        let choice = TransportChoice::ALL
            .into_iter()
            .find(|one| one.name() == transport);
        let transport = choice.ok_or_else(|| {
            let allowed = TransportChoice::ALL.map(TransportChoice::name).join(", ");
            PyValueError::new_err(format!("transport is {transport:?}; allowed: {allowed}"))
        })?;
        Ok(Self(CommOptions {
            transport,
            one_host,
            encrypt,
            spin: Duration::from_micros(spin_microseconds),
            ucx_library: ucx_library.map(Into::into),
            ucx_packages: ucx_packages.into_iter().map(Into::into).collect(),
            device_to_device,
            device_buffer_bytes,
            cuda_library: cuda_library.map(Into::into),
        }))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
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
    dict.set_item("unknown_peers_dropped", stats.unknown_peers_dropped)
}
