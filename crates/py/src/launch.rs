//! `LaunchInfo`: how this process was started, and as which rank.

use pyo3::prelude::*;
use shardwright_core::Launch;

use crate::arguments::variable;
use crate::error::launch_error;

/// This process's place among those that were started together.
///
/// `launcher` is `torchrun`, `openmpi`, `srun`, `environment` (another one that sets the same
/// variables as torchrun), or `single`. `job_id` is the same text on all ranks, and another one for
/// another job.
#[pyclass(frozen, get_all, module = "shardwright._core")]
pub(crate) struct LaunchInfo {
    launcher: String,
    rank: u32,
    world_size: u32,
    local_rank: u32,
    local_size: u32,
    rendezvous_host: Option<String>,
    rendezvous_port: Option<u16>,
    single_host: bool,
    job_id: String,
}

#[pymethods]
impl LaunchInfo {
    /// Finds out how this process was started, from its environment; raises `JobStartError` where
    /// variables are missing, are no numbers or contradict each other, or ranks on several hosts do
    /// not know where to meet, and says what to set.
    #[staticmethod]
    fn detect(environ: &Bound<'_, PyAny>) -> PyResult<Self> {
        let found = Launch::detect(&|name| variable(environ, name))
            .map_err(|error| launch_error(&error))?;
        let (rendezvous_host, rendezvous_port) = found.rendezvous.unzip();
        Ok(Self {
            launcher: found.launcher.to_owned(),
            rank: found.rank,
            world_size: found.world_size,
            local_rank: found.local_rank,
            local_size: found.local_size,
            rendezvous_host,
            rendezvous_port,
            single_host: found.single_host,
            job_id: found.job_id,
        })
    }
}
