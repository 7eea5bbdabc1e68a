//! Divides a model's tree of modules over the stages of a pipeline (paper, section 4.5 and
//! appendix C). Pure: a [`PartitionRequest`] in, a [`PartitionDecision`] out; nothing depends on time, chance, or the
//! order of hashes.
//!
//! ```
//! use shardwright_partition::{PartitionDecision, PartitionRequest};
//!
//! let request = PartitionRequest::from_json(
//!     r#"{
//!         "format_version": 2, "num_devices": 2, "alpha": 0.8, "auto": true,
//!         "modules": [
//!             {"name": "", "class_name": "Sequential"},
//!             {"name": "0", "class_name": "Linear", "parents": [0], "parameters": [0]},
//!             {"name": "1", "class_name": "Linear", "parents": [0], "parameters": [1]}
//!         ],
//!         "parameters": [
//!             {"names": ["0.weight"], "bytes": 64, "numel": 16},
//!             {"names": ["1.weight"], "bytes": 64, "numel": 16}
//!         ]
//!     }"#,
//! )?;
//! let decision = PartitionDecision::new(&request)?;
//! assert_eq!(decision.modules[2].pp_rank.0, 1);
//! # Ok::<(), shardwright_partition::PartitionError>(())
//! ```
//!
//! How the paper is read is written down in `docs/design/partition.md`.

mod allot;
mod assign;
mod cost;
mod crossing;
mod decision;
mod error;
mod measured;
mod node;
mod refine;
mod request;
mod shards;
mod table;

pub use allot::{Claim, dhondt, segments};
pub use cost::Computation;
pub use crossing::Crossing;
pub use decision::{DeviceLoad, ModulePlace, NodePlace, PartitionDecision};
pub use error::PartitionError;
pub use measured::{Execution, Measured, ModuleInterval};
pub use node::NodeId;
pub use refine::Refinement;
pub use request::{Calls, FORMAT_VERSION, ModuleInput, ParameterInput, PartitionRequest, Pin};
pub use shards::{Shard, ShardItem, shards};
