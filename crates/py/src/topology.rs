//! `Topology`: ranks, their coordinates, and the groups they form.

use pyo3::prelude::*;
use shardwright_core::{Coordinates, Group, Rank, TopologyError};

use crate::error::topology_error;

/// How the ranks of a job are arranged.
///
/// Groups are named `WORLD`, `MP_GROUP`, `DP_GROUP`, `PP_GROUP`, `TP_GROUP`, `RDP_GROUP`; their
/// members are in ascending order of global rank.
#[pyclass(frozen, eq, module = "shardwright._core")]
#[derive(PartialEq)]
pub(crate) struct Topology(pub(crate) shardwright_core::Topology);

#[pymethods]
impl Topology {
    #[new]
    #[pyo3(signature = (world, pipeline, tensor=1, placement="cluster"))]
    fn new(world: u32, pipeline: u32, tensor: u32, placement: &str) -> PyResult<Self> {
        let placement = raised(placement.parse())?;
        raised(shardwright_core::Topology::new(
            world, pipeline, tensor, &placement,
        ))
        .map(Self)
    }

    /// Ranks in the job.
    #[getter]
    fn world_size(&self) -> u32 {
        self.0.world_size()
    }

    /// The order of axes: letters from the slowest to the fastest varying one.
    #[getter]
    fn placement(&self) -> String {
        self.0.placement().to_string()
    }

    /// Ranks in each group of this kind.
    fn size(&self, group: &str) -> PyResult<u32> {
        Ok(self.0.size(named(group)?))
    }

    /// A global rank's number in its group of this kind.
    fn rank_in(&self, group: &str, rank: u32) -> PyResult<u32> {
        raised(self.0.rank_in(named(group)?, Rank(rank)))
    }

    /// The global ranks of a rank's group.
    fn group(&self, group: &str, rank: u32) -> PyResult<Vec<u32>> {
        raised(self.0.members(named(group)?, Rank(rank))).map(numbers)
    }

    /// The global rank of the member with this number in a rank's group.
    fn global_rank(&self, group: &str, rank: u32, number: u32) -> PyResult<u32> {
        raised(self.0.global_rank(named(group)?, Rank(rank), number)).map(|rank| rank.0)
    }

    /// All groups of this kind, ordered by their first member.
    fn groups(&self, group: &str) -> PyResult<Vec<Vec<u32>>> {
        let groups = self.0.groups(named(group)?);
        Ok(groups.into_iter().map(numbers).collect())
    }

    /// `(pp_rank, tp_rank, rdp_rank)` of a global rank.
    fn coordinates(&self, rank: u32) -> PyResult<(u32, u32, u32)> {
        let at = raised(self.0.coordinates(Rank(rank)))?;
        Ok((at.pipeline, at.tensor, at.reduced_data))
    }

    /// The global rank at a place.
    fn rank_at(&self, pp_rank: u32, tp_rank: u32, rdp_rank: u32) -> PyResult<u32> {
        let coordinates = Coordinates {
            pipeline: pp_rank,
            tensor: tp_rank,
            reduced_data: rdp_rank,
        };
        raised(self.0.rank_at(coordinates)).map(|rank| rank.0)
    }

    fn __repr__(&self) -> String {
        format!(
            "Topology(world={}, pipeline={}, tensor={}, placement='{}')",
            self.0.world_size(),
            self.0.size(Group::PipelineParallel),
            self.0.size(Group::TensorParallel),
            self.0.placement(),
        )
    }
}

fn raised<T>(result: Result<T, TopologyError>) -> PyResult<T> {
    result.map_err(|error| topology_error(&error))
}

fn named(group: &str) -> PyResult<Group> {
    raised(group.parse())
}

fn numbers(ranks: Vec<Rank>) -> Vec<u32> {
    ranks.into_iter().map(|rank| rank.0).collect()
}
