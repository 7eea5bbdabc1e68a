//! `LaunchInfo`: how this process was started, and as which rank.

use pyo3::prelude::*;
use shardwright_core::{GroupMeeting, Launch};

use crate::arguments::variable;
use crate::error::{argument_error, launch_error};

/// This process's place among those that were started together.
///
/// `launcher` is `torchrun`, `openmpi`, `srun`, `environment` (another one that sets the same
/// variables as torchrun), `torch` (a process group that the script made), or `single`. `job_id` is
/// the same text on all ranks, and another one for another job.
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
        let found = Launch::detect(&|name| variable(environ, name));
        Ok(found.map_err(|error| launch_error(&error))?.into())
    }

    /// As `detect`, beside the process group that the script has made with torch, in which this process is
    /// `rank` of `world_size`; raises `JobStartError` where they contradict each other. `None` where only the group
    /// knows the place: then `of_group` makes it.
    #[staticmethod]
    fn beside_group(
        environ: &Bound<'_, PyAny>,
        rank: u32,
        world_size: u32,
    ) -> PyResult<Option<Self>> {
        let found = Launch::beside_group(&|name| variable(environ, name), rank, world_size);
        Ok(found.map_err(|error| launch_error(&error))?.map(Self::from))
    }

    /// The place of a rank of the process group that the script has made. `hosts` has a text for each rank, equal for
    /// ranks of one host; rank 0 is reached at the host and port; no other job has the same `job_id`.
    #[staticmethod]
    fn of_group(
        rank: u32,
        hosts: Vec<String>,
        rendezvous_host: String,
        rendezvous_port: u16,
        job_id: String,
    ) -> PyResult<Self> {
        if rank as usize >= hosts.len() {
            return Err(argument_error(format!(
                "rank is {rank} of {} ranks",
                hosts.len()
            )));
        }
        let place = (rendezvous_host, rendezvous_port);
        let meeting = GroupMeeting {
            hosts,
            place,
            job_id,
        };
        Ok(Launch::of_group(rank, meeting).into())
    }
}

impl From<Launch> for LaunchInfo {
    fn from(found: Launch) -> Self {
        let (rendezvous_host, rendezvous_port) = found.rendezvous.unzip();
        Self {
            launcher: found.launcher.to_owned(),
            rank: found.rank,
            world_size: found.world_size,
            local_rank: found.local_rank,
            local_size: found.local_size,
            rendezvous_host,
            rendezvous_port,
            single_host: found.single_host,
            job_id: found.job_id,
        }
    }
}

/// Ends this process by a signal as soon as another one has ended, with all of its process group if it leads that.
///
/// Raises `OSError` where there is no such process, or no thread to wait for its end.
#[pyfunction]
pub(crate) fn end_with(process: u32) -> PyResult<()> {
    Ok(shardwright_system::end_with(process)?)
}
