//! Why a configuration is refused.

use thiserror::Error;

use crate::topology::TopologyError;

/// Why a configuration is refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The text is not JSON.
    #[error("the configuration is not valid JSON: {0}")]
    Json(String),
    /// The text is JSON but no object.
    #[error("the configuration is {0}; allowed: an object of keys and values")]
    NotAnObject(&'static str),
    /// A key that does not exist.
    #[error(
        "there is no configuration key {key:?} (its value is {value}){}",
        nearest.map_or_else(String::new, |name| format!("; the nearest one is {name:?}"))
    )]
    UnknownKey {
        /// The key.
        key: String,
        /// Its value, as JSON.
        value: String,
        /// The existing key most like it.
        nearest: Option<&'static str>,
    },
    /// A value that the key never takes.
    #[error("the configuration key {key:?} is {value}; allowed: {allowed}")]
    NotAllowed {
        /// The key.
        key: &'static str,
        /// The value, as JSON.
        value: String,
        /// What would be allowed.
        allowed: String,
    },
    /// A good value whose feature does not exist yet.
    #[error(
        "the configuration key {key:?} is {value}, but {reason}; allowed until then: {default}, its default"
    )]
    NotBuilt {
        /// The key.
        key: &'static str,
        /// The value, as JSON.
        value: String,
        /// What is missing.
        reason: &'static str,
        /// The default, as JSON.
        default: String,
    },
    /// A key of the second version of the interface.
    #[error(
        "there is no configuration key {key:?}: it is one of torch.sagemaker, the second version of the interface, and this library has the first; {instead}"
    )]
    OfVersion2 {
        /// The key.
        key: String,
        /// What there is in its place.
        instead: &'static str,
    },
    /// Two names of one key with different values.
    #[error(
        "{older:?} is {first} and {name:?} is {second}; they are two names of one key: give one of them, or equal values"
    )]
    NamesDiffer {
        /// The older name.
        older: &'static str,
        /// Its value, as JSON.
        first: String,
        /// The name.
        name: &'static str,
        /// Its value, as JSON.
        second: String,
    },
    /// Manual placement without a place for the rest.
    #[error("default_partition must be supplied if auto_partition is set to False!")]
    DefaultPartitionMissing,
    /// A limit on microbatches that the schedule would not keep.
    #[error(
        "\"active_microbatches\" is {active} with \"pipeline\" \"simple\", which keeps all microbatches in flight; allowed: {microbatches} (\"microbatches\") or more, not giving it, or \"pipeline\" \"interleaved\""
    )]
    ActiveMicrobatchesIgnored {
        /// The limit asked for.
        active: u32,
        /// Microbatches of a step.
        microbatches: u32,
    },
    /// A limit on microbatches that a list or a program would not keep.
    #[error(
        "\"active_microbatches\" is {active}, but \"pipeline\" has {needed} microbatches in flight at once; allowed: {needed} or more, or not giving it"
    )]
    ActiveMicrobatchesExceeded {
        /// The limit asked for.
        active: u32,
        /// What the order needs.
        needed: u32,
    },
    /// A limit on memory that the schedule would not keep.
    #[error(
        "\"memory_limit_bytes\" is given with \"pipeline\" {pipeline}, which does not choose how many microbatches are in flight; allowed: \"pipeline\" \"interleaved\" or \"zero_bubble\", or not giving it"
    )]
    MemoryLimitIgnored {
        /// The schedule.
        pipeline: String,
    },
    /// An entry of a list of starts.
    #[error("the configuration key \"pipeline\" has {value} at index {index}; allowed: {allowed}")]
    ListEntry {
        /// Its index, from 0.
        index: usize,
        /// The entry, as JSON.
        value: String,
        /// What would be allowed.
        allowed: String,
    },
    /// A list of starts in which one is missing.
    #[error(
        "the configuration key \"pipeline\" is a list of {length} entries without {missing}; allowed: every microbatch from 0 to {} once with \"forward\" and once with \"backward\"",
        microbatches - 1
    )]
    ListIncomplete {
        /// How many entries there are.
        length: usize,
        /// The first entry that is missing.
        missing: String,
        /// How many microbatches there are.
        microbatches: u32,
    },
    /// A program that does not fit the job, or cannot be run.
    #[error("the configuration key \"pipeline\" is a program that is refused: {why}")]
    Program {
        /// Why.
        why: String,
    },
    /// Fast mode without static mode.
    #[error(
        "the configuration key \"fast_mode\" is true, but static_mode is false, without which it does nothing; set \"static_mode\": True too, or leave out \"fast_mode\""
    )]
    FastModeAlone,
    /// A partition to load, from no file.
    #[error(
        "the configuration key \"load_partition\" is true, but there is no \"partition_file\" to load it from; give the path"
    )]
    PartitionFileMissing,
    /// A directory for files that nobody writes.
    #[error(
        "the configuration key \"offload_directory\" has an effect only with \"offload_activations\" or \
         \"offload_optimizer\": \"disk\"; leave it out, or offload to disk"
    )]
    OffloadDirectoryAlone,
    /// Encryption over UCX.
    #[error(
        "the configuration key \"encrypt\" is true, but \"transport\" is \"ucx\", which would send between hosts what nobody encrypts; allowed with \"encrypt\": \"auto\", \"tcp\" or \"shared_memory\""
    )]
    EncryptedUcx,
    /// Two dtypes for one model.
    #[error(
        "the configuration keys {first:?} and {second:?} are both true; they ask for different dtypes: give one of them"
    )]
    TwoDtypes {
        /// One key.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// Gradients in float32 where they are anyway.
    #[error(
        "the configuration key \"_fp32_grad_accumulation\" is true, which needs \"fp16\" or \"bf16\" to be true"
    )]
    NeedsHalfPrecision,
    /// Sharded data parallelism with a feature that it cannot be combined with.
    #[error(
        "the configuration key \"sharded_data_parallel_degree\" is {degree}, but {key:?} is {value}, and {reason}; allowed together with it: {default}, or a \"sharded_data_parallel_degree\" of 1"
    )]
    NotWithSharding {
        /// `sharded_data_parallel_degree`.
        degree: u32,
        /// The other key.
        key: &'static str,
        /// Its value, as JSON.
        value: String,
        /// Why.
        reason: &'static str,
        /// Its default, as JSON.
        default: String,
    },
    /// A key of sharded data parallelism without it.
    #[error(
        "the configuration key {key:?} is {value}, but \"sharded_data_parallel_degree\" is 1, with which it does nothing; set a degree of 2 or more, or leave out {key:?}"
    )]
    NeedsSharding {
        /// The key.
        key: &'static str,
        /// The value, as JSON.
        value: String,
    },
    /// Replicas that cannot be divided into groups.
    #[error(
        "the configuration key \"sharded_data_parallel_degree\" is {degree}, and the job has {replicas} model replicas; allowed: {}",
        allowed.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    ShardingDegree {
        /// `sharded_data_parallel_degree`.
        degree: u32,
        /// Replicas in the job.
        replicas: u32,
        /// The divisors of their number.
        allowed: Vec<u32>,
    },
    /// A key of data parallelism without data parallelism.
    #[error("the configuration key {key:?} is {value}, which needs \"ddp\" to be true")]
    NeedsDataParallelism {
        /// The key.
        key: &'static str,
        /// The value, as JSON.
        value: String,
    },
    /// More ranks than one replica needs, without data parallelism.
    #[error(
        "the world size {world} is more than one model replica's {replica} ranks (pipeline_parallel_degree * tensor_parallel_degree): the replicas are data parallel, which needs \"ddp\" to be true; allowed without it: a world size of {replica}"
    )]
    WorldNeedsDataParallelism {
        /// Ranks in the job.
        world: u32,
        /// Ranks of a replica.
        replica: u32,
    },
    /// The ranks cannot be arranged.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}
