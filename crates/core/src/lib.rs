//! Ids, units, configuration, ranks and groups, and the errors that every other crate speaks in.
//! Pure: no clock, no I/O, no threads.

mod collectives;
pub mod config;
pub mod ids;
mod launch;
mod loss_scale;
mod path;
mod phase;
mod seed;
mod text;
pub mod topology;
pub mod twister;

pub use collectives::{CollectiveBackEnd, CollectivesError, RankFacts, choose_collective_back_end};
pub use config::{Config, ConfigError};
pub use ids::{
    CallId, MicrobatchId, ModelId, ModuleId, PipelineRank, Rank, RequestId, StageId, StepEpoch,
    WorkerId,
};
pub use launch::{GroupMeeting, Launch, LaunchError};
pub use loss_scale::{DynamicLossScale, LossScaleError, LossScaleSettings};
pub use path::CallPath;
pub use phase::Phase;
pub use seed::derive_seed;
pub use text::{bounded, one_line, one_line_to};
pub use topology::{Coordinates, Group, Placement, Topology, TopologyError};
