//! The one table of all keys. A later feature removes its `not_built`, or adds a row here and a
//! field to [`Config`](super::Config); a test holds the two together.

use super::key::DefaultValue::{self, Boolean, Derived, Integer, Nothing, Number, Word};
use super::key::ValueKind::{self, Address, Choice, Count, Duration, Placement, Schedule, Text};
use super::key::{ConfigKey, Origin};

const FLAG: ValueKind = ValueKind::Boolean;
/// Degrees and numbers of microbatches travel as 32-bit indices.
const POSITIVE: ValueKind = ValueKind::Integer(1, u32::MAX as u64);

const TENSORFLOW_ONLY: &str = "it is a TensorFlow-only key and this library is for PyTorch";

const fn common(
    name: &'static str,
    kind: ValueKind,
    default: DefaultValue,
    unit: &'static str,
    meaning: &'static str,
) -> ConfigKey {
    ConfigKey::new(Origin::Common, name, kind, default, unit, meaning)
}

const fn torch(
    name: &'static str,
    kind: ValueKind,
    default: DefaultValue,
    unit: &'static str,
    meaning: &'static str,
) -> ConfigKey {
    ConfigKey::new(Origin::PyTorch, name, kind, default, unit, meaning)
}

const fn own(
    name: &'static str,
    kind: ValueKind,
    default: DefaultValue,
    unit: &'static str,
    meaning: &'static str,
) -> ConfigKey {
    ConfigKey::new(Origin::Shardwright, name, kind, default, unit, meaning)
}

/// Every key, in the order of the documentation.
pub const KEYS: &[ConfigKey] = &[
    common("pipeline_parallel_degree", POSITIVE, Integer(1), "ranks", "stages of a pipeline: the number of parts the model is divided into"),
    common("partitions", POSITIVE, Integer(1), "ranks", "the older name of pipeline_parallel_degree; both given must be equal"),
    common("microbatches", POSITIVE, Integer(1), "microbatches", "parts a batch is split into; the batch size must be a multiple of it"),
    common("pipeline", Schedule, Word("interleaved"), "", "simple runs all forwards and then all backwards; interleaved runs a ready backward first, else the next forward; looped, for several parts of the model on one rank, runs forward and backward by turns and a group of microbatches round by round; zero_bubble does as interleaved and computes weight gradients in what would be idle time, after three steps only where that makes the step faster, and with no more in flight than that needs; auto begins as interleaved and goes on with what the first steps show to be the fastest; _only_forward does as interleaved, and refuses model.backward; a list is the order in which the root starts forwards and backwards; a program file says what each rank does, in order"),
    common("optimize", Choice(&["memory", "speed"]), Word("memory"), "", "what the partition balances by default (see memory_weight)"),
    common("placement_strategy", Placement, Word("cluster"), "", "how coordinates become global ranks: letters from the slowest to the fastest varying axis; cluster is DPT, spread is TPD"),
    common("auto_partition", FLAG, Boolean(true), "", "false: every module goes where smp.partition or smp.set_partition puts it, else to default_partition"),
    common("default_partition", ValueKind::Integer(0, u32::MAX as u64), Integer(0), "pp_rank", "stage of modules that are not placed by hand; must be given with auto_partition false"),
    ConfigKey::new(Origin::TensorFlow, "contiguous", FLAG, Boolean(true), "", "TensorFlow only").not_built(TENSORFLOW_ONLY),
    ConfigKey::new(Origin::TensorFlow, "horovod", FLAG, Boolean(false), "", "TensorFlow only").not_built(TENSORFLOW_ONLY),
    torch("memory_weight", ValueKind::Number(0.0, 1.0), Derived("0.2 with optimize speed, 0.8 with memory"), "", "weight of memory against computation in the cost of a module"),
    torch("ddp", FLAG, Boolean(false), "", "data parallelism over model replicas; required as soon as there is more than one"),
    torch("ddp_port", ValueKind::Integer(1, 65_535), Nothing, "TCP port", "port of the rendezvous instead of MASTER_PORT; needs ddp"),
    torch("ddp_dist_backend", Choice(&["auto", "nccl", "gloo"]), Word("auto"), "", "back end of collectives: auto takes NCCL where every rank has a GPU of its own, else Gloo, and a process group that the script made before as it is; nccl and gloo insist; needs ddp"),
    torch("active_microbatches", POSITIVE, Derived("pipeline_parallel_degree + 2, but 2 * pipeline_parallel_degree with pipeline looped"), "microbatches", "microbatches in flight at once, except with pipeline simple"),
    torch("deterministic_server", FLAG, Boolean(false), "", "runs of one layout give the same bits: gradients are summed in one order, whatever the order in which requests are served; keeps a gradient for each microbatch until the step ends"),
    torch("tensor_parallel_degree", POSITIVE, Integer(1), "ranks", "ranks over which each distributed module is split; more than 1 needs ddp"),
    torch("fp16", FLAG, Boolean(false), "", "train in float16: smp.DistributedModel casts the model, smp.DistributedOptimizer keeps float32 master weights and scales the loss"),
    torch("bf16", FLAG, Boolean(false), "", "train in bfloat16: as fp16, but the loss is not scaled"),
    torch("fp16_params", FLAG, Boolean(false), "", "create the parameters of distributed modules in float16, and leave everything else to the script; not with bf16"),
    torch("shard_optimizer_state", FLAG, Boolean(false), "", "ranks that hold the same parameters each keep the optimizer state of a share of them, and get the gradients of that share only; updated parameters are gathered in optimizer.step(); needs ddp"),
    torch("offload_activations", ValueKind::FlagOr(&["disk"]), Boolean(false), "", "move what checkpointed modules keep out of memory until their backward is near: true to host memory, disk to a file in offload_directory; no effect without activation checkpointing"),
    torch("activation_loading_horizon", POSITIVE, Integer(4), "tasks", "how many tasks ahead offloaded activations come back; each forward and each second computation of a checkpointed module is a task"),
    torch("prescaled_batch", FLAG, Boolean(false), "", "ranks of a TP_GROUP receive the same batch"),
    torch("_prescaled_batch", FLAG, Boolean(false), "", "the older name of prescaled_batch; both given must be equal"),
    torch("skip_tracing", FLAG, Boolean(false), "", "divide the model by parameters and numbers of modules, without a trace"),
    torch("sharded_data_parallel_degree", POSITIVE, Integer(1), "ranks", "data-parallel ranks among which parameters, gradients and optimizer state are sharded; a divisor of the number of replicas, and each group of so many replicas has all of them; more than 1 needs ddp; not with tensor_parallel_degree, fp16 or shard_optimizer_state"),
    torch("sdp_reduce_bucket_size", Count(1), Integer(500_000_000), "elements", "the most elements of parameters that are gathered, and whose gradients are reduced, by one collective of sharded data parallelism, unless one module, or one parameter in a pipeline, has more"),
    torch("sdp_param_persistence_threshold", Count(0), Integer(1_000_000), "elements", "parameters with fewer elements stay whole on every rank under sharded data parallelism"),
    torch("sdp_max_live_parameters", Count(1), Integer(1_000_000_000), "elements", "under sharded data parallelism, the next module's parameters are gathered ahead of its turn on GPUs if no more elements than these are whole then; a stage of a pipeline, which gathers all of its parameters, may not have more"),
    torch("sdp_hierarchical_allgather", FLAG, Boolean(true), "", "under sharded data parallelism over several hosts, gather parameters between hosts by one rank of each host for each share, and then within hosts; without effect on one host"),
    torch("sdp_gradient_clipping", ValueKind::Number(0.000_001, 1e9), Number(1.0), "L2 norm", "under sharded data parallelism, optimizer.step() clips gradients by this norm over the whole model"),
    torch("delayed_parameter_initialization", FLAG, Boolean(false), "", "smp.model_creation delays parameters until they are placed"),
    torch("static_mode", FLAG, Boolean(false), "", "steps do alike: once a module on another rank has given results of the same structure, shapes and dtypes for static_steps steps, its caller goes on without waiting for them"),
    torch("fast_mode", FLAG, Boolean(false), "", "with static_mode: results go to the rank that uses them next directly, and not by way of the caller, also where tensor_handles is false"),
    torch("checkpoint_attentions", FLAG, Boolean(true), "", "compute attention scores of distributed transformer layers again in the backward pass, where no fused kernel does so already"),
    torch("load_partition", FLAG, Boolean(false), "", "divide the model as partition_file says, and not by cost; false: write that file when the model is divided"),
    torch("partition_file", Text, Nothing, "path", "a file with the pp_rank of each module, which rank 0 reads or writes; for a further model of the job its number is added, as in `.1`"),
    torch("overlapping_allreduce", FLAG, Nothing, "", "false: no DistributedModel overlaps its all-reduce with backward; else its own argument decides"),
    torch("_match_weights", FLAG, Boolean(false), "", "either value: distributed modules always start from the weights of the modules that they replace"),
    torch("_fp32_grad_accumulation", FLAG, Boolean(false), "", "for tests: with fp16 or bf16, gradients of half-precision parameters are float32, so they are summed over microbatches and replicas in float32"),
    own("seed", ValueKind::Integer(0, i64::MAX as u64), Integer(0), "", "seed of the random numbers drawn in steps (see reproducible_rng)"),
    own("reproducible_rng", FLAG, Boolean(false), "", "random numbers in a step depend on `seed`, the step, the microbatch and the module call only, the same for every degree of parallelism; false: they depend on the script's seed and on how the model is divided"),
    own("tensor_handles", FLAG, Boolean(true), "", "results that the caller only hands on stay where they are made until the next module needs them; false, and with tensor parallelism: every result comes to its caller"),
    own("static_steps", POSITIVE, Integer(5), "steps", "with static_mode: for how many steps a module has to do alike before its caller goes on without its results"),
    own("on_departure", Choice(&["fallback", "error"]), Word("fallback"), "", "with static_mode, when a module gives other results than before: fallback takes the step back on all ranks and runs it again, waiting for each result; error raises DepartureError"),
    own("refine_partition", FLAG, Derived("true, but false with deterministic_server"), "", "time the modules of the first step's forward on rank 0, if it is large enough, and after the division by cost move modules wherever the simulated step gets faster; the partition may then differ from run to run"),
    own("sdp_stage", ValueKind::Integer(1, 3), Integer(3), "", "what sharded data parallelism shards during a step: 1 optimizer state; 2 gradients too, which are reduced after each module's backward; 3 parameters too, which are gathered for each module's forward and backward. Between steps all three are sharded; in a pipeline a stage gathers its parameters once in a step, and reduces gradients at its end"),
    own("stall_report_seconds", Duration, Number(30.0), "seconds", "after this long without progress anywhere in the job, say what each rank waits for"),
    own("stall_timeout_seconds", Duration, Number(1800.0), "seconds", "after this long without progress anywhere in the job, end it with an error"),
    own("liveness_timeout_seconds", Duration, Number(6.0), "seconds", "a rank that is silent for longer is lost"),
    own("connect_timeout_seconds", Duration, Number(60.0), "seconds", "how long ranks wait for each other at the start"),
    own("secret_file", Text, Nothing, "path", "file with the job's secret, which belongs to this user and nobody else can read; the environment's SHARDWRIGHT_SECRET goes before it; with neither, a random one where all ranks are on one host").per_rank(),
    own("allow_insecure_hosts", FLAG, Boolean(false), "", "allow a job on several hosts without a secret: anybody who reaches its ports can take part"),
    own("bind_interface_address", Address, Nothing, "IP address", "the address of this host that listeners bind to; else the one that reaches the rendezvous").per_rank(),
    own("transport", Choice(&["auto", "tcp", "ucx", "shared_memory"]), Word("auto"), "", "what carries messages between ranks: auto UCX over shared memory where it is found, else TCP, with the tensors for ranks of the same host in shared memory; ucx the same, but a job without UCX does not start, and between hosts UCX uses TCP too, which proves nothing: the network has to be trusted; shared_memory nothing of UCX; tcp nothing else"),
    own("encrypt", FLAG, Boolean(false), "", "encrypt the connections between ranks (the Noise protocol with the job's secret), and let nothing else leave a host: no UCX between hosts"),
    own("comm_spin_microseconds", ValueKind::Integer(0, u32::MAX as u64), Derived("300, but 50 where a host has more ranks than processors"), "microseconds", "how long a thread that waits for a message, on a rank that has nothing else to do, looks for it again and again before it sleeps; 0: it sleeps at once").per_rank(),
    own("ucx_library", Text, Nothing, "path", "the UCX library (libucp.so.0) to load; else the system's, else that of the Python package libucx").per_rank(),
    own("comm_buffer_bytes", Count(0), Integer(1 << 30), "bytes", "the most host memory that a rank sets aside for the transfer of tensors; what finds no room goes over TCP").per_rank(),
    own("memory_limit_bytes", Count(1), Nothing, "bytes", "with pipeline interleaved or zero_bubble: the most that parameters, gradients, optimizer state, buffers and activations may take on a rank; as many microbatches are in flight as fit and make the step faster"),
    own("offload_optimizer", ValueKind::FlagOr(&["disk"]), Boolean(false), "", "keep the optimizer's state, and master weights of fp16 and bf16, out of the memory that the rank computes in: disk in a file in offload_directory; true in locked host memory, from which optimizer.step() of a CUDA rank brings about 192 MiB at once to the device; CPU ranks use host memory anyway, and have about 128 MiB of the file in it at once"),
    own("offload_directory", Text, Nothing, "path", "where the files of what is offloaded to disk are, one for each rank, without a name and gone with the process; else the directory for temporary files").per_rank(),
    own("elastic_degrees", ValueKind::Words(&super::elastic::DEGREES), Nothing, "", "degrees that are lowered where the number of ranks does not fit them, as after a restart with fewer: to the most stages times tensor-parallel ranks that fit, then to the most tensor-parallel ranks, then to the most shards; tensor_parallel_degree and sharded_data_parallel_degree to divisors only"),
];
