//! Traces of `torch.profiler` of all ranks, as one file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use shardwright_core::one_line;
use shardwright_timeline::{ProfileError, RankProfile, clock_of, profile_frame};

use crate::timeline::Timeline;

/// Write what a rank adds to the trace of all: the events of a trace of `torch.profiler`, and those of a timeline.
///
/// `threads` names threads of the process `pid` by their native ids. `origin_ns` is where the clock of the whole trace
/// begins. Raises `ValueError` if the trace is not one of the profiler.
#[pyfunction]
#[pyo3(signature = (trace, part, /, *, rank, name, pid, threads, timeline, origin_ns))]
#[expect(clippy::too_many_arguments, reason = "all are keywords in Python")]
pub(crate) fn write_profile_part(
    py: Python<'_>,
    trace: PathBuf,
    part: PathBuf,
    rank: u32,
    name: String,
    pid: u64,
    threads: BTreeMap<u64, String>,
    timeline: &Bound<'_, Timeline>,
    origin_ns: u64,
) -> PyResult<()> {
    let timeline = timeline.get();
    py.detach(move || {
        let profile = RankProfile {
            rank,
            name: &name,
            pid,
            threads: &threads,
            timeline: timeline.records_of_ranks(),
            origin_ns,
        };
        let read = || File::open(&trace).map(BufReader::new);
        let base_ns = clock_of(read().map_err(|error| at(&trace, &error))?)
            .map_err(|error| no_trace(&trace, &error))?;
        let to = File::create(&part).map_err(|error| at(&part, &error))?;
        let from = read().map_err(|error| at(&trace, &error))?;
        let written = profile.write(base_ns, from, BufWriter::new(to));
        written.map_err(|error| match error {
            ProfileError::Write(error) => at(&part, &error),
            error @ ProfileError::Trace(_) => no_trace(&trace, &error),
        })
    })
}

/// Put the parts of all ranks together into one trace for Perfetto.
#[pyfunction]
#[pyo3(signature = (parts, path, /, *, origin_ns))]
pub(crate) fn join_profile(
    py: Python<'_>,
    parts: Vec<PathBuf>,
    path: PathBuf,
    origin_ns: u64,
) -> PyResult<()> {
    py.detach(move || {
        let file = File::create(&path).map_err(|error| at(&path, &error))?;
        let mut to = BufWriter::new(file);
        let (head, end) = profile_frame(origin_ns);
        let joined = to.write_all(head.as_bytes());
        joined.map_err(|error| at(&path, &error))?;
        for (number, part) in parts.iter().enumerate() {
            let mut from = File::open(part).map_err(|error| at(part, &error))?;
            let comma = if number > 0 { ",\n" } else { "" };
            let copied =
                (to.write_all(comma.as_bytes())).and_then(|()| io::copy(&mut from, &mut to));
            copied.map_err(|error| at(&path, &error))?;
        }
        let ended = to.write_all(end.as_bytes()).and_then(|()| to.flush());
        ended.map_err(|error| at(&path, &error))
    })
}

fn at(path: &Path, error: &io::Error) -> PyErr {
    PyOSError::new_err(one_line(&format!("{}: {error}", path.display())))
}

fn no_trace(path: &Path, error: &ProfileError) -> PyErr {
    PyValueError::new_err(one_line(&format!("{}: {error}", path.display())))
}
