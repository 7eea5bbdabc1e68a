//! `Timeline`: records of ranks, as files and figures.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use shardwright_core::{ModelId, ModuleId, one_line};
use shardwright_runtime::TraceRecord;
use shardwright_timeline::{Record, RecordKind, TraceError};

/// What ranks did when: records on one clock. Made by the execution server, or from JSON.
#[pyclass(frozen, module = "shardwright._core")]
pub(crate) struct Timeline(shardwright_timeline::Timeline);

impl Timeline {
    pub(crate) fn records_of_ranks(&self) -> &shardwright_timeline::Timeline {
        &self.0
    }
}

#[pymethods]
impl Timeline {
    /// What `to_json` made, or records from elsewhere: `{"records": [...], "lost": 0}`.
    #[staticmethod]
    #[pyo3(signature = (text, /))]
    fn from_json(text: &str) -> PyResult<Self> {
        let read = shardwright_timeline::Timeline::from_json(text);
        read.map(Self).map_err(|error| trace_error(&error))
    }

    /// One timeline of the parts of several ranks, each as `to_json` made it.
    #[staticmethod]
    #[pyo3(signature = (parts, /))]
    fn join(py: Python<'_>, parts: Vec<String>) -> PyResult<Self> {
        py.detach(|| {
            let parts = parts
                .into_iter()
                .map(|part| shardwright_timeline::Timeline::from_json(&part));
            let parts: Result<Vec<_>, _> = parts.collect();
            parts.map(|parts| Self(shardwright_timeline::Timeline::join(parts)))
        })
        .map_err(|error| trace_error(&error))
    }

    /// The timeline of a `trace.json`. Raises `ValueError` for one of a newer format or of another program.
    #[staticmethod]
    #[pyo3(signature = (path, /))]
    fn read(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(move || {
            let text = fs::read_to_string(&path).map_err(|error| file_error(&path, &error))?;
            let read = shardwright_timeline::Timeline::from_trace(&text);
            read.map(Self).map_err(|error| {
                let text = format!("{}: {error}", path.display());
                PyValueError::new_err(one_line(&text))
            })
        })
    }

    /// Write `trace.json`, for Perfetto, and `timeline.html`, for any browser, into a folder.
    #[pyo3(signature = (folder, /))]
    fn write(&self, py: Python<'_>, folder: PathBuf) -> PyResult<()> {
        py.detach(move || {
            fs::create_dir_all(&folder).map_err(|error| file_error(&folder, &error))?;
            for (name, text) in [
                ("trace.json", self.0.to_trace()),
                ("timeline.html", self.0.to_page()),
            ] {
                let path = folder.join(name);
                fs::write(&path, text).map_err(|error| file_error(&path, &error))?;
            }
            Ok(())
        })
    }

    /// A step, or the newest, as an SVG picture.
    #[pyo3(signature = (step=None))]
    fn svg(&self, step: Option<u64>) -> PyResult<String> {
        let chosen = self.0.step_or_newest(step);
        let chosen = chosen.map_err(|error| trace_error(&error))?;
        let step = chosen.ok_or_else(|| PyValueError::new_err("this timeline has no records"))?;
        Ok(self.0.to_svg(step))
    }

    /// The records, by start: dicts of rank, step, kind, `start_ns` and `end_ns` on a clock that all ranks share, and where
    /// known phase, worker, module, microbatch, peer, request and bytes.
    #[pyo3(signature = () -> "list[dict[str, Any]]")]
    fn records<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        loads(py, &json(&self.0.records()))
    }

    /// The steps that have records.
    fn steps(&self) -> Vec<u64> {
        self.0.steps()
    }

    /// How many records were overwritten before they were taken.
    #[getter]
    fn lost(&self) -> u64 {
        self.0.lost()
    }

    /// The time of each rank by activity, idle time and bytes; of a step, or of all.
    #[pyo3(signature = (step=None) -> "dict[str, Any]")]
    fn summary<'py>(&self, py: Python<'py>, step: Option<u64>) -> PyResult<Bound<'py, PyAny>> {
        if step.is_some() {
            let found = self.0.step_or_newest(step);
            found.map_err(|error| trace_error(&error))?;
        }
        loads(py, &json(&self.0.summary(step)))
    }

    /// All of it as JSON.
    fn to_json(&self) -> String {
        self.0.to_json()
    }
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("records are JSON")
}

fn loads<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (text,))
}

fn trace_error(error: &TraceError) -> PyErr {
    PyValueError::new_err(one_line(&error.to_string()))
}

fn file_error(path: &std::path::Path, error: &std::io::Error) -> PyErr {
    PyOSError::new_err(one_line(&format!("{}: {error}", path.display())))
}

/// What a rank's server or recorder has kept.
pub(crate) fn timeline_of(
    rank: u32,
    origin: SystemTime,
    records: &[TraceRecord],
    lost: u64,
    module_name: impl Fn(ModelId, ModuleId) -> String,
) -> PyResult<Timeline> {
    timeline_from(origin, lost, |nanoseconds| {
        let records = records.iter().map(|record| {
            let kind =
                RecordKind::from_name(record.kind.name()).expect("both sides have the same kinds");
            let names = record.model.zip(record.module);
            Record {
                start_ns: nanoseconds(record.start),
                end_ns: nanoseconds(record.end),
                phase: record.phase,
                worker: record.worker.map(|worker| worker.0),
                module: names.map(|(model, module)| module_name(model, module)),
                microbatch: record.microbatch.map(|microbatch| microbatch.0),
                peer: record.peer.map(|peer| peer.0),
                request: record.request.map(|request| request.0),
                bytes: record.bytes,
                ..Record::new(rank, record.step.0, kind)
            }
        });
        records.collect()
    })
}

/// The records that `make` makes, with a clock that counts from `origin`.
pub(crate) fn timeline_from(
    origin: SystemTime,
    lost: u64,
    make: impl FnOnce(&dyn Fn(Duration) -> u64) -> Vec<Record>,
) -> PyResult<Timeline> {
    let origin = origin
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_err(|_| PyRuntimeError::new_err("the system's clock stands before 1970"))?;
    let records = make(&|time| (origin + time).as_nanos() as u64);
    Ok(Timeline(shardwright_timeline::Timeline::new(records, lost)))
}
