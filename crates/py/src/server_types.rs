//! What the execution server hands to Python: events, tasks, requests and counters.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use shardwright_runtime::{MainEvent, Stats, TaskCounters, WorkCounts};
use shardwright_wire::{Body, Phase};

use crate::requests::Request;
use crate::tensors::TensorParts;
use crate::values::Spec;

pub(crate) fn parse_phase(name: &str) -> PyResult<Phase> {
    [Phase::Forward, Phase::Backward]
        .into_iter()
        .find(|phase| phase.name() == name)
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
    /// The worker to start; None for another event.
    worker: Option<u32>,
    /// The control request to answer; None for another event.
    request: Option<Py<Request>>,
    /// What the step returned, the value and its tensors; None for another event.
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
    /// `root`, `forward`, `backward`, `close` or `weight`.
    kind: &'static str,
    /// The request; None for a root task and for weight gradients.
    request: Option<Py<Request>>,
    /// The microbatch.
    microbatch: u32,
    /// What `defer_weight_gradient` was given; None for other tasks.
    token: Option<u64>,
}

impl Task {
    pub(crate) fn new(py: Python<'_>, task: shardwright_runtime::Task) -> PyResult<Self> {
        Ok(match task {
            shardwright_runtime::Task::Root { microbatch } => Self {
                kind: "root",
                request: None,
                microbatch: microbatch.0,
                token: None,
            },
            shardwright_runtime::Task::WeightGradient(deferred) => Self {
                kind: "weight",
                request: None,
                microbatch: deferred.microbatch.0,
                token: Some(deferred.token),
            },
            shardwright_runtime::Task::Request(request) => Self {
                kind: request.work.kind().name(),
                microbatch: request.microbatch.0,
                request: Some(Py::new(py, Request::new(py, *request)?)?),
                token: None,
            },
        })
    }
}

pub(crate) fn split(py: Python<'_>, body: Body) -> PyResult<(Py<Spec>, Py<TensorParts>)> {
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
        ("held_responses", stats.held_responses),
        ("stale_messages", stats.stale_messages),
        ("unexpected_messages", stats.unexpected_messages),
        ("kept_messages", stats.kept_messages),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

fn counters_dict<'py>(py: Python<'py>, counters: &TaskCounters) -> PyResult<Bound<'py, PyDict>> {
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
