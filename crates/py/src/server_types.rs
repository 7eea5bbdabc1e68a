//! What the execution server hands to Python: events, tasks, requests, counters and records.

use std::time::{Duration, SystemTime};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use shardwright_core::{ModelId, ModuleId, Rank, RequestId};
use shardwright_runtime::{Counters, MainEvent, Stats, TraceRecord, WorkCounts};
use shardwright_wire::{Body, Phase, Value, Work, text};

use crate::tensors::TensorParts;
use crate::values::Spec;

pub(crate) fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
    }
}

pub(crate) fn parse_phase(name: &str) -> PyResult<Phase> {
    [Phase::Forward, Phase::Backward]
        .into_iter()
        .find(|phase| phase_name(*phase) == name)
        .ok_or_else(|| {
            PyValueError::new_err(format!(
                "{name:?} is no phase; allowed are \"forward\" and \"backward\""
            ))
        })
}

/// Something for the main thread, from `Server.supervise`.
#[pyclass(frozen, get_all, module = "shardwright._core")]
pub(crate) struct Event {
    /// `start_worker`, `control`, `step_end`, `root_done`, `stall_report` or `aborted_locally`.
    kind: &'static str,
    /// The worker to start.
    worker: Option<u32>,
    /// The control request to answer.
    request: Option<Py<Request>>,
    /// What the step returned: the value and its tensors.
    body: Option<(Py<Spec>, Py<TensorParts>)>,
    /// Who waits for whom.
    text: Option<String>,
}

impl Event {
    pub(crate) fn new(py: Python<'_>, event: MainEvent) -> PyResult<Self> {
        let mut made = Self {
            kind: "",
            worker: None,
            request: None,
            body: None,
            text: None,
        };
        match event {
            MainEvent::StartWorker(worker) => {
                made.kind = "start_worker";
                made.worker = Some(worker.0);
            }
            MainEvent::Control(request) => {
                made.kind = "control";
                made.request = Some(Py::new(py, Request::new(py, *request)?)?);
            }
            MainEvent::StepEnd(body) => {
                made.kind = "step_end";
                made.body = Some(split(py, body)?);
            }
            MainEvent::RootDone => made.kind = "root_done",
            MainEvent::StallReport(text) => {
                made.kind = "stall_report";
                made.text = Some(text);
            }
            MainEvent::Failed(_) => made.kind = "aborted_locally",
        }
        Ok(made)
    }
}

/// What a worker is to run, from `Server.next_task`.
#[pyclass(frozen, get_all, module = "shardwright._core")]
pub(crate) struct Task {
    /// `root`, `forward`, `backward` or `close`.
    kind: &'static str,
    /// The request; None for a root task.
    request: Option<Py<Request>>,
    /// The microbatch.
    microbatch: u32,
}

impl Task {
    pub(crate) fn new(py: Python<'_>, task: shardwright_runtime::Task) -> PyResult<Self> {
        Ok(match task {
            shardwright_runtime::Task::Root { microbatch } => Self {
                kind: "root",
                request: None,
                microbatch: microbatch.0,
            },
            shardwright_runtime::Task::Request(request) => Self {
                kind: work_kind(&request.work),
                microbatch: request.microbatch.0,
                request: Some(Py::new(py, Request::new(py, *request)?)?),
            },
        })
    }
}

/// A request of another rank (the paper, appendix B).
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Request {
    /// All but the body, which is apart because its tensors can be taken.
    head: shardwright_wire::Request,
    spec: Py<Spec>,
    parts: Py<TensorParts>,
}

impl Request {
    fn new(py: Python<'_>, mut request: shardwright_wire::Request) -> PyResult<Self> {
        let empty = Body {
            value: Value::None,
            tensors: Vec::new(),
        };
        let (spec, parts) = split(py, std::mem::replace(&mut request.body, empty))?;
        Ok(Self {
            head: request,
            spec,
            parts,
        })
    }

    pub(crate) fn key(&self) -> (Rank, RequestId) {
        (self.head.requester, self.head.id)
    }
}

#[pymethods]
impl Request {
    /// Its id, unique at the requester.
    #[getter]
    fn id(&self) -> u64 {
        self.head.id.0
    }

    /// The global rank that asks.
    #[getter]
    fn requester(&self) -> u32 {
        self.head.requester.0
    }

    /// The step.
    #[getter]
    fn step(&self) -> u64 {
        self.head.step.0
    }

    /// `forward`, `backward`, `close` or `control`.
    #[getter]
    fn kind(&self) -> &'static str {
        work_kind(&self.head.work)
    }

    /// The model.
    #[getter]
    fn model(&self) -> u32 {
        self.head.model.0
    }

    /// The module; None for a control request.
    #[getter]
    fn module(&self) -> Option<u32> {
        match &self.head.work {
            Work::Forward { module, .. }
            | Work::Backward { module, .. }
            | Work::Close { module, .. } => Some(module.0),
            Work::Control { .. } => None,
        }
    }

    /// The children of an `nn.Sequential` to run, as `(start, end)`; None for the whole module.
    #[getter]
    fn range(&self) -> Option<(u32, u32)> {
        match &self.head.work {
            Work::Forward { range, .. } => range.map(|range| (range.start, range.end)),
            Work::Backward { .. } | Work::Close { .. } | Work::Control { .. } => None,
        }
    }

    /// For a backward or close: the id of the forward request.
    #[getter]
    fn forward(&self) -> Option<u64> {
        match &self.head.work {
            Work::Backward { forward, .. } | Work::Close { forward, .. } => Some(forward.0),
            Work::Forward { .. } | Work::Control { .. } => None,
        }
    }

    /// For a control request: what it is about.
    #[getter]
    fn control(&self) -> Option<String> {
        match &self.head.work {
            Work::Control { name } => Some(name.clone()),
            Work::Forward { .. } | Work::Backward { .. } | Work::Close { .. } => None,
        }
    }

    /// The microbatch.
    #[getter]
    fn microbatch(&self) -> u32 {
        self.head.microbatch.0
    }

    /// The request that the requester was executing; None in the step function itself.
    #[getter]
    fn parent(&self) -> Option<u64> {
        self.head.place.parent.map(|parent| parent.0)
    }

    /// The call's number in that execution.
    #[getter]
    fn call(&self) -> u32 {
        self.head.place.call.0
    }

    /// Whether gradients are enabled.
    #[getter]
    fn grad_mode(&self) -> bool {
        self.head.context.grad_mode
    }

    /// Whether inference mode is on.
    #[getter]
    fn inference_mode(&self) -> bool {
        self.head.context.inference_mode
    }

    /// Enabled autocast states: device type, dtype, cache enabled.
    #[getter]
    fn autocast(&self) -> Vec<(String, String, bool)> {
        self.head.context.autocast.clone()
    }

    /// Whether the work is to be checkpointed.
    #[getter]
    fn checkpointing(&self) -> bool {
        self.head.context.checkpointing
    }

    /// The arguments, or the gradients, without their tensors.
    #[getter]
    fn spec(&self, py: Python<'_>) -> Py<Spec> {
        self.spec.clone_ref(py)
    }

    /// Their tensors.
    #[getter]
    fn parts(&self, py: Python<'_>) -> Py<TensorParts> {
        self.parts.clone_ref(py)
    }

    /// Every field, one a line.
    fn text(&self) -> String {
        let mut whole = self.head.clone();
        whole.body = Body {
            value: self.spec.get().0.clone(),
            tensors: self.parts.get().copies(),
        };
        text::request(&whole)
    }

    fn __repr__(&self) -> String {
        format!(
            "<{} request {} of rank {}>",
            self.kind(),
            self.head.id,
            self.head.requester
        )
    }
}

fn work_kind(work: &Work) -> &'static str {
    match work {
        Work::Forward { .. } => "forward",
        Work::Backward { .. } => "backward",
        Work::Close { .. } => "close",
        Work::Control { .. } => "control",
    }
}

fn split(py: Python<'_>, body: Body) -> PyResult<(Py<Spec>, Py<TensorParts>)> {
    Ok((
        Py::new(py, Spec(body.value))?,
        Py::new(py, TensorParts::received(body.tensors))?,
    ))
}

/// The counters as nested dicts.
pub(crate) fn stats_dict<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("total", counters_dict(py, &stats.total)?)?;
    dict.set_item("step", counters_dict(py, &stats.step)?)?;
    for (name, value) in [
        ("steps", stats.steps),
        ("steps_failed", stats.steps_failed),
        ("workers_started", stats.workers_started),
        ("live_requests", stats.live_requests),
        ("stale_messages", stats.stale_messages),
        ("unexpected_messages", stats.unexpected_messages),
        ("kept_messages", stats.kept_messages),
        ("trace_lost", stats.trace_lost),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

fn counters_dict<'py>(py: Python<'py>, counters: &Counters) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("sent", work_dict(py, &counters.sent)?)?;
    dict.set_item("served", work_dict(py, &counters.served)?)?;
    for (name, value) in [
        ("tasks", counters.tasks),
        ("suspensions", counters.suspensions),
        ("switches", counters.switches),
        ("max_pending", counters.max_pending),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

fn work_dict<'py>(py: Python<'py>, counts: &WorkCounts) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in [
        ("forward", counts.forward),
        ("backward", counts.backward),
        ("close", counts.close),
        ("control", counts.control),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// Trace records as the dicts that timelines are drawn from.
pub(crate) fn trace_list<'py>(
    py: Python<'py>,
    rank: u32,
    origin: SystemTime,
    records: &[TraceRecord],
    module_name: impl Fn(ModelId, ModuleId) -> String,
) -> PyResult<Bound<'py, PyList>> {
    let origin = origin
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_err(|_| PyRuntimeError::new_err("the system's clock stands before 1970"))?;
    let nanoseconds = |time: Duration| (origin + time).as_nanos();
    let list = PyList::empty(py);
    for record in records {
        let dict = PyDict::new(py);
        let module = record
            .model
            .zip(record.module)
            .map(|(model, module)| module_name(model, module));
        dict.set_item("rank", rank)?;
        dict.set_item("step", record.step.0)?;
        dict.set_item("kind", record.kind.name())?;
        dict.set_item("start_ns", nanoseconds(record.start))?;
        dict.set_item("end_ns", nanoseconds(record.end))?;
        dict.set_item("phase", record.phase.map(phase_name))?;
        dict.set_item("worker", record.worker.map(|worker| worker.0))?;
        dict.set_item("module", module)?;
        dict.set_item(
            "microbatch",
            record.microbatch.map(|microbatch| microbatch.0),
        )?;
        dict.set_item("peer", record.peer.map(|peer| peer.0))?;
        dict.set_item("bytes", record.bytes)?;
        list.append(dict)?;
    }
    Ok(list)
}
