//! Ranks, their coordinates, and the groups they form.
//!
//! `pipeline * tensor * reduced_data = world` and `data = tensor * reduced_data`: tensor
//! parallelism runs across data-parallel ranks. A model-parallel group is one replica of the
//! model: all ranks with the same reduced-data coordinate. Members of a group are in ascending
//! order of global rank, and a rank's number in a group is its place in that order.

mod placement;
#[cfg(test)]
mod tests;

pub use placement::{Axis, Placement};

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::Rank;

/// Why ranks cannot be arranged, or a rank cannot be found.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TopologyError {
    /// A size is zero.
    #[error("{what} is 0; allowed: at least 1")]
    Zero {
        /// Which size.
        what: &'static str,
    },
    /// The world does not consist of whole model replicas.
    #[error(
        "the world size {world} is not divisible by pipeline_parallel_degree * tensor_parallel_degree = {pipeline} * {tensor}"
    )]
    NotDivisible {
        /// Ranks in the job.
        world: u32,
        /// Stages of a pipeline.
        pipeline: u32,
        /// Ranks that split a module.
        tensor: u32,
    },
    /// Not a placement strategy.
    #[error(
        "placement_strategy is {0:?}; allowed: \"cluster\", \"spread\", or a permutation of the letters D, P, T"
    )]
    Placement(String),
    /// Not a group.
    #[error(
        "there is no group {0:?}; allowed: WORLD, MP_GROUP, DP_GROUP, PP_GROUP, TP_GROUP, RDP_GROUP"
    )]
    Group(String),
    /// A rank that the job, or a group, does not have.
    #[error("{what} {rank} does not exist; allowed: 0 to {last}")]
    NoSuchRank {
        /// Which kind of rank.
        what: &'static str,
        /// The rank asked for.
        rank: u32,
        /// The largest one there is.
        last: u32,
    },
}

/// The groups a rank belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    /// Every rank of the job.
    World,
    /// One replica of the model.
    ModelParallel,
    /// Ranks that run the same stage.
    DataParallel,
    /// The stages of one pipeline.
    PipelineParallel,
    /// Ranks that split the same modules.
    TensorParallel,
    /// Ranks that hold exactly the same parameters.
    ReducedDataParallel,
}

impl Group {
    /// All groups.
    pub const ALL: [Self; 6] = [
        Self::World,
        Self::ModelParallel,
        Self::DataParallel,
        Self::PipelineParallel,
        Self::TensorParallel,
        Self::ReducedDataParallel,
    ];

    /// The public name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::World => "WORLD",
            Self::ModelParallel => "MP_GROUP",
            Self::DataParallel => "DP_GROUP",
            Self::PipelineParallel => "PP_GROUP",
            Self::TensorParallel => "TP_GROUP",
            Self::ReducedDataParallel => "RDP_GROUP",
        }
    }

    const fn rank_name(self) -> &'static str {
        match self {
            Self::World => "rank",
            Self::ModelParallel => "mp_rank",
            Self::DataParallel => "dp_rank",
            Self::PipelineParallel => "pp_rank",
            Self::TensorParallel => "tp_rank",
            Self::ReducedDataParallel => "rdp_rank",
        }
    }

    /// Whether members of the group differ along the axis.
    const fn varies(self, axis: Axis) -> bool {
        match self {
            Self::World => true,
            Self::ModelParallel => matches!(axis, Axis::Pipeline | Axis::Tensor),
            Self::DataParallel => matches!(axis, Axis::ReducedData | Axis::Tensor),
            Self::PipelineParallel => matches!(axis, Axis::Pipeline),
            Self::TensorParallel => matches!(axis, Axis::Tensor),
            Self::ReducedDataParallel => matches!(axis, Axis::ReducedData),
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Group {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Self, TopologyError> {
        Self::ALL
            .into_iter()
            .find(|group| group.name() == text)
            .ok_or_else(|| TopologyError::Group(text.to_owned()))
    }
}

/// A rank's place along each axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Coordinates {
    /// `pp_rank`.
    pub pipeline: u32,
    /// `tp_rank`.
    pub tensor: u32,
    /// `rdp_rank`.
    pub reduced_data: u32,
}

impl Coordinates {
    const fn get(self, axis: Axis) -> u32 {
        match axis {
            Axis::ReducedData => self.reduced_data,
            Axis::Pipeline => self.pipeline,
            Axis::Tensor => self.tensor,
        }
    }

    const fn set(&mut self, axis: Axis, value: u32) {
        match axis {
            Axis::ReducedData => self.reduced_data = value,
            Axis::Pipeline => self.pipeline = value,
            Axis::Tensor => self.tensor = value,
        }
    }
}

/// How the ranks of a job are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    sizes: Coordinates,
    placement: Placement,
}

impl Topology {
    /// Arranges `world` ranks in pipelines of `pipeline` stages, each stage split over `tensor` ranks.
    pub fn new(
        world: u32,
        pipeline: u32,
        tensor: u32,
        placement: &Placement,
    ) -> Result<Self, TopologyError> {
        for (what, size) in [
            ("the world size", world),
            ("pipeline_parallel_degree", pipeline),
            ("tensor_parallel_degree", tensor),
        ] {
            if size == 0 {
                return Err(TopologyError::Zero { what });
            }
        }
        let refused = TopologyError::NotDivisible {
            world,
            pipeline,
            tensor,
        };
        let replica = pipeline.checked_mul(tensor).ok_or(refused.clone())?;
        if !world.is_multiple_of(replica) {
            return Err(refused);
        }
        let sizes = Coordinates {
            pipeline,
            tensor,
            reduced_data: world / replica,
        };
        Ok(Self {
            sizes,
            placement: *placement,
        })
    }

    /// Ranks in the job.
    pub const fn world_size(&self) -> u32 {
        self.size(Group::World)
    }

    /// Ranks in each group of this kind.
    pub const fn size(&self, group: Group) -> u32 {
        let sizes = self.sizes;
        match group {
            Group::World => sizes.pipeline * sizes.tensor * sizes.reduced_data,
            Group::ModelParallel => sizes.pipeline * sizes.tensor,
            Group::DataParallel => sizes.tensor * sizes.reduced_data,
            Group::PipelineParallel => sizes.pipeline,
            Group::TensorParallel => sizes.tensor,
            Group::ReducedDataParallel => sizes.reduced_data,
        }
    }

    /// The order of axes.
    pub const fn placement(&self) -> Placement {
        self.placement
    }

    /// A rank's place along each axis.
    pub fn coordinates(&self, rank: Rank) -> Result<Coordinates, TopologyError> {
        self.check(Group::World, rank.0)?;
        let mut rest = rank.0;
        let mut coordinates = Coordinates::default();
        for axis in self.placement.axes().into_iter().rev() {
            let size = self.sizes.get(axis);
            coordinates.set(axis, rest % size);
            rest /= size;
        }
        Ok(coordinates)
    }

    /// The rank at a place.
    pub fn rank_at(&self, coordinates: Coordinates) -> Result<Rank, TopologyError> {
        self.check(Group::PipelineParallel, coordinates.pipeline)?;
        self.check(Group::TensorParallel, coordinates.tensor)?;
        self.check(Group::ReducedDataParallel, coordinates.reduced_data)?;
        Ok(Rank(self.number(Group::World, coordinates)))
    }

    /// A rank's number in its group of this kind (`dp_rank`, `mp_rank`, ...).
    pub fn rank_in(&self, group: Group, rank: Rank) -> Result<u32, TopologyError> {
        Ok(self.number(group, self.coordinates(rank)?))
    }

    /// The members of a rank's group, in ascending order.
    pub fn members(&self, group: Group, rank: Rank) -> Result<Vec<Rank>, TopologyError> {
        let own = self.coordinates(rank)?;
        (0..self.size(group))
            .map(|number| self.member(group, own, number))
            .collect()
    }

    /// The global rank of the member with this number in a rank's group.
    pub fn global_rank(
        &self,
        group: Group,
        rank: Rank,
        number: u32,
    ) -> Result<Rank, TopologyError> {
        let own = self.coordinates(rank)?;
        self.check(group, number)?;
        self.member(group, own, number)
    }

    /// All groups of this kind, ordered by their first member.
    pub fn groups(&self, group: Group) -> Vec<Vec<Rank>> {
        (0..self.world_size())
            .filter(|&rank| self.rank_in(group, Rank(rank)) == Ok(0))
            .map(|rank| {
                self.members(group, Rank(rank))
                    .expect("every rank below the world size has groups")
            })
            .collect()
    }

    /// Mixed-radix number over the axes along which the group varies: ascending in global rank,
    /// since the other axes are constant within a group.
    fn number(&self, group: Group, coordinates: Coordinates) -> u32 {
        self.placement
            .axes()
            .into_iter()
            .filter(|&axis| group.varies(axis))
            .fold(0, |number, axis| {
                number * self.sizes.get(axis) + coordinates.get(axis)
            })
    }

    fn member(
        &self,
        group: Group,
        mut coordinates: Coordinates,
        number: u32,
    ) -> Result<Rank, TopologyError> {
        let mut rest = number;
        for axis in self.placement.axes().into_iter().rev() {
            if group.varies(axis) {
                let size = self.sizes.get(axis);
                coordinates.set(axis, rest % size);
                rest /= size;
            }
        }
        self.rank_at(coordinates)
    }

    fn check(&self, group: Group, rank: u32) -> Result<(), TopologyError> {
        let size = self.size(group);
        if rank < size {
            return Ok(());
        }
        Err(TopologyError::NoSuchRank {
            what: group.rank_name(),
            rank,
            last: size - 1,
        })
    }
}
