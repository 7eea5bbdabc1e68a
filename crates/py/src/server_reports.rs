//! `Server`: what it tells of itself: a line for reports, counters, times and timelines.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use shardwright_core::{ModelId, Rank};

use crate::server::Server;
use crate::server_types::stats_dict;
use crate::timeline::{Timeline, timeline_of};
use crate::usage::PyUsage;

#[pymethods]
impl Server {
    /// Give the modules of a model their names, by id, for reports and timelines.
    fn name_modules(&self, model: u32, names: Vec<String>) -> PyResult<()> {
        self.here()?.name_modules(ModelId(model), names);
        Ok(())
    }

    /// What this rank does, or another was last heard to do: one line, for any thread.
    #[pyo3(signature = (rank=None))]
    fn describe(&self, rank: Option<u32>) -> PyResult<String> {
        let server = self.here()?;
        Ok(rank.map_or_else(
            || server.describe(),
            |rank| server.last_heartbeat(Rank(rank)),
        ))
    }

    /// Counters: of the newest step (`step`), since the start (`total`), and of the present.
    #[pyo3(signature = () -> "dict[str, Any]")]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_dict(py, &self.here()?.stats())
    }

    /// Where the time went of all steps that ended well, and of the newest one. Steps that divided a model over ranks
    /// count as the newest only.
    fn usage(&self) -> PyResult<(PyUsage, PyUsage)> {
        let (total, newest) = self.here()?.usage();
        Ok((PyUsage(total), PyUsage(newest)))
    }

    /// Keep records of what runs, waits and travels from now on, or keep none.
    #[pyo3(signature = (on, /))]
    fn keep_trace(&self, on: bool) -> PyResult<()> {
        self.here()?.keep_trace(on);
        Ok(())
    }

    /// The records of what ran, waited and travelled since the last call.
    ///
    /// Times are nanoseconds since the Unix epoch, so that ranks of one host share a clock.
    fn take_trace(&self) -> PyResult<Timeline> {
        let server = self.here()?;
        let (origin, records, lost) = server.take_trace();
        timeline_of(self.rank, origin, &records, lost, |model, module| {
            server.module_name(model, module)
        })
    }
}
