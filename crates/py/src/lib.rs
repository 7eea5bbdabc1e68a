//! The extension module `shardwright._core`; the only crate that names pyo3.

mod alone;
mod answers;
mod arguments;
mod calls;
mod checkpoint;
mod checkpoint_background;
mod checkpoint_full;
mod checkpoint_incoming;
mod checkpoint_pieces;
mod collectives;
mod comm;
mod command;
mod config;
mod deadlock;
mod description;
mod error;
mod facts;
#[cfg(feature = "faults")]
mod faults;
mod grad_mode;
mod interruptible;
mod launch;
mod log;
mod loss_scale;
mod mapped;
mod memory;
mod modules;
mod node;
mod notes;
mod offload;
mod packing;
mod partition;
mod profile;
mod raw;
mod recipes;
mod rendezvous;
mod requests;
mod schedule;
mod seed;
mod server;
mod server_calls;
mod server_reports;
mod server_stays;
mod server_types;
mod simulate;
mod sites;
mod tensors;
mod timeline;
mod topology;
mod torch_context;
mod torch_types;
mod twister;
mod usage;
mod values;

use pyo3::prelude::*;

/// Shardwright's Rust core.
#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::alone::AloneRecorder;
    #[pymodule_export]
    use crate::checkpoint::{
        CheckpointReader, CheckpointWriter, is_in_store, newest_checkpoint, set_newest_checkpoint,
    };
    #[pymodule_export]
    use crate::checkpoint_background::{CheckpointMemory, PartInBackground};
    #[pymodule_export]
    use crate::checkpoint_full::export_full_checkpoint;
    #[pymodule_export]
    use crate::checkpoint_incoming::{IncomingCopy, IncomingPart};
    #[pymodule_export]
    use crate::collectives::collective_back_end;
    #[pymodule_export]
    use crate::comm::{PyCommOptions, means};
    #[pymodule_export]
    use crate::command::command;
    #[pymodule_export]
    use crate::config::Config;
    #[pymodule_export]
    use crate::launch::{LaunchInfo, end_with};
    #[pymodule_export]
    use crate::log::take_log;
    #[pymodule_export]
    use crate::loss_scale::DynamicLossScale;
    #[pymodule_export]
    use crate::mapped::{MappedFile, MappedMemory};
    #[pymodule_export]
    use crate::memory::{
        MemoryCategories, MemoryMeter, heap_bytes, in_flight, map_large_allocations, memory_limit,
        process_memory,
    };
    #[pymodule_export]
    use crate::modules::{owned_tensors, parameters_in_use};
    #[pymodule_export]
    use crate::node::Node;
    #[pymodule_export]
    use crate::offload::{HostMemory, Offload, OffloadedCall};
    #[pymodule_export]
    use crate::partition::{partition, shard_parameters};
    #[pymodule_export]
    use crate::profile::{join_profile, write_profile_part};
    #[pymodule_export]
    use crate::rendezvous::{Rendezvous, weakness_of_secret};
    #[pymodule_export]
    use crate::timeline::Timeline;
    #[pymodule_export]
    use crate::topology::Topology;

    #[pymodule_export]
    use crate::answers::Answer;
    #[pymodule_export]
    use crate::calls::{BackwardCall, BackwardLink, ForwardCall, ForwardLink, Place};
    #[pymodule_export]
    use crate::deadlock::DeadlockDetector;
    #[pymodule_export]
    use crate::description::Description;
    #[pymodule_export]
    use crate::facts::{
        Getters, TensorsBefore, detached, kept_by_others, memory_ids, references_to_storage,
    };
    #[pymodule_export]
    use crate::grad_mode::GradMode;
    #[pymodule_export]
    use crate::notes::{ArgumentNotes, ResultNotes};
    #[pymodule_export]
    use crate::recipes::{Composite, Recipe, View};
    #[pymodule_export]
    use crate::requests::Request;
    #[pymodule_export]
    use crate::schedule::{
        choose_schedule, is_schedule, read_program, splits_backward, tune_schedule,
    };
    #[pymodule_export]
    use crate::seed::derive_seed;
    #[pymodule_export]
    use crate::server::Server;
    #[pymodule_export]
    use crate::server_types::{Event, EventKind, Task, TaskKind};
    #[pymodule_export]
    use crate::simulate::{reference_program, simulate};
    #[pymodule_export]
    use crate::sites::Sites;
    #[pymodule_export]
    use crate::tensors::TensorParts;
    #[pymodule_export]
    use crate::torch_context::{TorchContext, TorchSetting};
    #[pymodule_export]
    use crate::twister::advance_twister;
    #[pymodule_export]
    use crate::usage::PyUsage;
    #[pymodule_export]
    use crate::values::{Spec, flatten};

    #[pymodule_export]
    const DTYPES: [&str; 21] = crate::torch_types::DTYPES;
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python has for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
