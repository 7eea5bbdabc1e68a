//! Newtypes for every index that crosses a module border.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// A process of the job, by its global rank.
    Rank(u32)
);
id!(
    /// A position in a pipeline-parallel group (the paper's `pp_rank`).
    PipelineRank(u32)
);
id!(
    /// A part of a model that runs as one task of a pipeline; counted from the input on.
    StageId(u32)
);
id!(
    /// One of the `microbatches` parts of a batch.
    MicrobatchId(u32)
);
id!(
    /// A `DistributedModel` of the job, in order of construction.
    ModelId(u32)
);
id!(
    /// A module of a model, by its place in `named_modules()`.
    ModuleId(u32)
);
id!(
    /// A request, unique among those that one rank has made.
    RequestId(u64)
);
id!(
    /// A remote call within the frame it was made from, in order of calling.
    CallId(u32)
);
id!(
    /// A call of a step function, counted from the start of the job.
    StepEpoch(u64)
);
id!(
    /// A Python thread that runs tasks on this rank.
    WorkerId(u32)
);
