//! What the execution server hands to Python: events, tasks, requests and counters.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use shardwright_runtime::{MainEvent, Stats, TaskCounters, WorkCounts};
use shardwright_wire::{Body, Phase, WorkKind};

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

/// What an event is about.
#[pyclass(
    frozen,
    eq,
    hash,
    rename_all = "SCREAMING_SNAKE_CASE",
    module = "shardwright._core"
)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum EventKind {
    StartWorker,
    Control,
    StepEnd,
    RootDone,
    StallReport,
    AbortedLocally,
}

/// Something for the main thread, from `Server.supervise`.
#[pyclass(frozen, get_all, module = "shardwright._core")]
pub(crate) struct Event {
    /// What it is about.
    kind: EventKind,
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
        let about = |kind| Self {
            kind,
            worker: None,
            request: None,
            body: None,
            text: None,
        };
        Ok(match event {
            MainEvent::StartWorker(worker) => Self {
                worker: Some(worker.0),
                ..about(EventKind::StartWorker)
            },
            MainEvent::Control(request) => Self {
                request: Some(Py::new(py, Request::new(py, *request)?)?),
                ..about(EventKind::Control)
            },
            MainEvent::StepEnd(body) => Self {
                body: Some(split(py, body)?),
                ..about(EventKind::StepEnd)
            },
            MainEvent::RootDone => about(EventKind::RootDone),
            MainEvent::StallReport(text) => Self {
                text: Some(text),
                ..about(EventKind::StallReport)
            },
            MainEvent::Failed(_) => about(EventKind::AbortedLocally),
        })
    }
}

/// What a task is.
#[pyclass(
    frozen,
    eq,
    hash,
    rename_all = "SCREAMING_SNAKE_CASE",
    module = "shardwright._core"
)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum TaskKind {
    Root,
    Forward,
    Backward,
    Close,
    WeightGradient,
}

/// What a worker is to run, from `Server.next_task`.
#[pyclass(frozen, get_all, module = "shardwright._core")]
pub(crate) struct Task {
    /// What it is.
    kind: TaskKind,
    /// The request; None for a root task and for weight gradients.
    request: Option<Py<Request>>,
    /// The microbatch.
    microbatch: u32,
    /// What `defer_weight_gradient` returned; None for other tasks.
    token: Option<u64>,
}

impl Task {
    pub(crate) fn new(py: Python<'_>, task: shardwright_runtime::Task) -> PyResult<Self> {
        Ok(match task {
            shardwright_runtime::Task::Root { microbatch } => Self {
                kind: TaskKind::Root,
                request: None,
                microbatch: microbatch.0,
                token: None,
            },
            shardwright_runtime::Task::WeightGradient(deferred) => Self {
                kind: TaskKind::WeightGradient,
                request: None,
                microbatch: deferred.microbatch.0,
                token: Some(deferred.token),
            },
            shardwright_runtime::Task::Request(request) => Self {
                kind: match request.work.kind() {
                    WorkKind::Forward => TaskKind::Forward,
                    WorkKind::Backward => TaskKind::Backward,
                    WorkKind::Close => TaskKind::Close,
                    WorkKind::Control => unreachable!("the main thread's"),
                },
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
