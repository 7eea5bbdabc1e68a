//! Ids, units, configuration, ranks and groups, the module tree, and the
//! errors that every other crate speaks in. Pure: no clock, no I/O, no threads.

pub mod ids;

pub use ids::{
    CallId, MicrobatchId, ModelId, ModuleId, PipelineRank, Rank, RequestId, StepEpoch, WorkerId,
};
