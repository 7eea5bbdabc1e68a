//! `Node`: this process's connection to the other ranks of its job.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use shardwright_comm::{self as comm, CommError, JobOptions, Joining, Router, Transport};
use shardwright_core::Rank;
use shardwright_wire::{Body, ErrorReport, Limits};

use crate::arguments::{duration, parse_address};
use crate::comm::{PyCommOptions, comm_stats, set_totals};
use crate::error::{comm_error, start_error};
use crate::interruptible::interruptible;
use crate::log;
use crate::rendezvous::Rendezvous;
use crate::tensors::{TensorParts, set_memory};
use crate::values::Spec;

/// The connection to the job. In a forked child every method raises, except for who is in the job, and `close`, which does
/// nothing.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Node(comm::Node);

#[pymethods]
impl Node {
    /// Join the job, and return when every rank has.
    ///
    /// Raises `JobStartError` when ranks are missing, do not share the secret, or differ in
    /// version, number of ranks or configuration (`fingerprint`; of several lines, those that
    /// differ are named). Timeouts are in seconds. `buffer_bytes` is the size of the persistent
    /// buffer for tensors on their way to ranks of the same host; 0 for none. `ucx` says whether UCX may be used where
    /// the options allow it, and `lacks` what this rank has not: then no rank starts, and all raise that.
    #[staticmethod]
    #[pyo3(signature = (*, rank, world, place, fingerprint, version, connect_timeout, liveness_timeout,
                        bind_address, host_name, options, buffer_bytes=0, ucx=true, lacks=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword-only, each its own setting"
    )]
    fn connect(
        py: Python<'_>,
        rank: u32,
        world: u32,
        place: &Rendezvous,
        fingerprint: String,
        version: String,
        connect_timeout: f64,
        liveness_timeout: f64,
        bind_address: Option<&str>,
        host_name: String,
        options: &PyCommOptions,
        buffer_bytes: u64,
        ucx: bool,
        lacks: Option<String>,
    ) -> PyResult<Self> {
        log::collect();
        let options = JobOptions {
            rank: Rank(rank),
            world,
            place: place.take()?,
            bind_address: bind_address.map(parse_address).transpose()?,
            host_name,
            version,
            fingerprint,
            connect_timeout: duration("connect_timeout", connect_timeout)?,
            liveness_timeout: duration("liveness_timeout", liveness_timeout)?,
            limits: Limits::default(),
            comm: options.0.clone(),
            buffer_bytes,
            ucx,
            lacks,
        };
        // With the GIL, so that no thread of Python's changes the environment meanwhile.
        let joining = Joining::prepare(options).map_err(|error| start_error(&error))?;
        let joined = interruptible(py, |go_on| joining.join(go_on))?;
        let node = joined.map_err(|error| start_error(&error))?;
        set_memory(&node.memory());
        Ok(Self(node))
    }

    /// The node of a job of one rank.
    #[staticmethod]
    fn single() -> PyResult<Self> {
        let mut nodes = Self::in_process(1)?;
        Ok(nodes.pop().expect("as many nodes as asked for"))
    }

    /// Nodes of ranks that share this process.
    #[staticmethod]
    fn in_process(world: usize) -> PyResult<Vec<Self>> {
        let nodes = comm::Node::in_process(world)?;
        Ok(nodes.into_iter().map(Self).collect())
    }

    /// Begin to use a CUDA device, as the first tensor would: the ranks of this host try to open each other's device
    /// memory.
    fn use_device(&self, py: Python<'_>, ordinal: i32) {
        let memory = self.0.memory();
        if let Some(device) = memory.device() {
            py.detach(|| device.activate_now(ordinal));
        }
    }

    /// This rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.transport().rank().0
    }

    /// The number of ranks.
    #[getter]
    fn world(&self) -> u32 {
        self.transport().world()
    }

    /// The name of a rank's host.
    fn host(&self, rank: u32) -> PyResult<String> {
        let peer = self.transport().peer(Rank(rank));
        peer.map(|peer| peer.host.clone()).ok_or_else(|| {
            PyValueError::new_err(format!(
                "rank {rank} is not one of {}",
                self.transport().world()
            ))
        })
    }

    /// Send an object; does not wait for its receiver. Takes the tensors out of `parts`.
    fn send_object(
        &self,
        py: Python<'_>,
        to: u32,
        channel: String,
        spec: &Spec,
        parts: &TensorParts,
    ) -> PyResult<()> {
        let body = Body {
            value: spec.0.clone(),
            tensors: parts.take(),
        };
        py.detach(|| self.0.send_object(Rank(to), channel, body))
            .map_err(|error| self.error(&error))
    }

    /// The next object that a rank sent on a channel; None when it did not come within `timeout` seconds.
    fn recv_object(
        &self,
        py: Python<'_>,
        source: u32,
        channel: &str,
        timeout: f64,
    ) -> PyResult<Option<(Spec, TensorParts)>> {
        let limit = duration("timeout", timeout)?;
        let received = interruptible(py, |go_on| {
            self.0.receive_object(Rank(source), channel, limit, go_on)
        })?;
        match received {
            Ok(body) => Ok(Some((
                Spec(body.value),
                TensorParts::received(body.tensors),
            ))),
            Err(CommError::Timeout { .. }) => Ok(None),
            Err(error) => Err(self.error(&error)),
        }
    }

    /// Keep a value for `peers` to fetch; the key to ask for it by. Takes the tensors out of `parts`.
    fn publish(&self, spec: &Spec, parts: &TensorParts, peers: Vec<u32>) -> PyResult<i64> {
        let node = self.here()?;
        let body = Body {
            value: spec.0.clone(),
            tensors: parts.take(),
        };
        Ok(node.publish(body, peers.into_iter().map(Rank)))
    }

    /// Ask for what a rank has published; it arrives as an object on the channel that this returns.
    fn fetch(&self, py: Python<'_>, source: u32, key: i64) -> PyResult<String> {
        py.detach(|| self.0.fetch(Rank(source), key))
            .map_err(|error| self.error(&error))
    }

    /// Tell a rank that this one will not fetch what it has published.
    fn release(&self, py: Python<'_>, source: u32, key: i64) -> PyResult<()> {
        py.detach(|| self.0.release(Rank(source), key))
            .map_err(|error| self.error(&error))
    }

    /// Wait until every rank of `group` has called this with the same name.
    ///
    /// Raises `PeerLostError` or `RemoteError` on all of them when one cannot come.
    #[pyo3(signature = (group, name, timeout=None))]
    fn barrier(
        &self,
        py: Python<'_>,
        group: Vec<u32>,
        name: &str,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let group: Vec<Rank> = group.into_iter().map(Rank).collect();
        let limit = timeout
            .map(|timeout| duration("timeout", timeout))
            .transpose()?;
        let outcome = interruptible(py, |go_on| self.0.barrier(&group, name, limit, go_on))?;
        outcome.map_err(|error| self.error(&error))
    }

    /// Counters since the start of the connection.
    #[pyo3(signature = () -> "dict[str, int]")]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let node = self.here()?;
        let stats = node.transport().stats();
        let dict = PyDict::new(py);
        set_totals(&dict, &stats)?;
        let (waiting, kept) = node.objects_held();
        dict.set_item("objects_waiting", waiting)?;
        dict.set_item("objects_kept_for_others", kept)?;
        Ok(dict)
    }

    /// What each route carried, why tensors took others than the best, and how each rank is reached.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn comm_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let node = self.here()?;
        comm_stats(py, node.choice(), &**node.transport())
    }

    /// Leave the job: the other ranks hear a shutdown notice, with `report` (kind, message, traceback)
    /// when an error is the reason. Takes a few seconds at most; further calls do nothing.
    #[pyo3(signature = (report: "dict[str, str] | None" = None))]
    fn close(&self, py: Python<'_>, report: Option<Bound<'_, PyDict>>) -> PyResult<()> {
        let report = report.map(|report| self.report(&report)).transpose()?;
        py.detach(|| self.0.close(report));
        Ok(())
    }
}

impl From<comm::Node> for Node {
    fn from(node: comm::Node) -> Self {
        Self(node)
    }
}

impl Node {
    /// The connection, in the process that made it.
    fn here(&self) -> PyResult<&comm::Node> {
        self.0.check().map_err(|error| self.error(&error))?;
        Ok(&self.0)
    }

    fn transport(&self) -> &dyn Transport {
        &**self.0.transport()
    }

    /// The transport, for the execution server.
    pub(crate) fn shared_transport(&self) -> Arc<dyn Transport> {
        Arc::clone(self.0.transport())
    }

    /// Where the execution server plugs itself in.
    pub(crate) fn router(&self) -> &Router {
        self.0.router()
    }

    /// The hosts of all ranks.
    pub(crate) fn hosts(&self) -> Vec<String> {
        let peers =
            (0..self.transport().world()).filter_map(|rank| self.transport().peer(Rank(rank)));
        peers.map(|peer| peer.host.clone()).collect()
    }

    fn error(&self, error: &CommError) -> PyErr {
        comm_error(error, |rank| {
            self.transport()
                .peer(rank)
                .map(|peer| peer.host.clone())
                .unwrap_or_default()
        })
    }

    fn report(&self, report: &Bound<'_, PyDict>) -> PyResult<ErrorReport> {
        let text = |name: &str| -> PyResult<String> {
            report
                .get_item(name)?
                .map_or_else(|| Ok(String::new()), |value| value.extract())
        };
        let rank = self.transport().rank();
        Ok(ErrorReport {
            rank,
            host: self
                .transport()
                .peer(rank)
                .map(|peer| peer.host.clone())
                .unwrap_or_default(),
            module: None,
            microbatch: None,
            phase: None,
            kind: text("kind")?,
            message: text("message")?,
            traceback: text("traceback")?,
        })
    }
}
