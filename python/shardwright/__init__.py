"""Shardwright: model parallelism for PyTorch with a Rust core.

``import shardwright as smp``, a few added lines, and an ordinary training script runs a model that is too large or
too slow for one device.
"""

from shardwright import entry as entry  # first: Ctrl-C in what follows

# isort: split
from shardwright import amp, model, nn, notebook, optimizers
from shardwright._core import __version__
from shardwright.activation_checkpointing.functions import checkpoint, checkpoint_sequential
from shardwright.activation_checkpointing.marking import set_activation_checkpointing
from shardwright.checkpoints import (
    export_torch_checkpoint,
    import_torch_checkpoint,
    load,
    resume_from_checkpoint,
    save,
    save_checkpoint,
)
from shardwright.data_parallel.sampler import DistributedSampler
from shardwright.delayed.creation import delay_param_initialization
from shardwright.errors import (
    CheckpointError,
    CheckpointGoneError,
    ConfigError,
    DepartureError,
    FrameError,
    JobStartError,
    LeftOutError,
    NotOwnedError,
    PartialUpdateError,
    PartitionError,
    PeerLostError,
    RemoteError,
    ShardwrightError,
    StallError,
    StepMismatchError,
    UnsupportedValueError,
    VerificationError,
)
from shardwright.half_precision import keep_float32
from shardwright.job.objects import allgather, barrier, broadcast, dp_barrier, mp_barrier, recv_from, send
from shardwright.job.process_groups import (
    get_dp_process_group,
    get_mp_process_group,
    get_pp_process_group,
    get_rdp_process_group,
    get_tp_process_group,
    get_world_process_group,
)
from shardwright.job.ranks import (
    DP_GROUP,
    MP_GROUP,
    PP_GROUP,
    RDP_GROUP,
    TP_GROUP,
    WORLD,
    CommGroup,
    RankType,
    dp_rank,
    dp_size,
    get_dp_group,
    get_mp_group,
    get_pp_group,
    get_rdp_group,
    get_tp_group,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from shardwright.memory import memory_report
from shardwright.model import AveragedModel, DistributedModel
from shardwright.model.updates import resume_after_failure
from shardwright.optimizer import DistributedOptimizer, clip_grad_norm_
from shardwright.partition import is_tracing, partition, set_partition
from shardwright.start import init, is_initialized, shutdown
from shardwright.state import state
from shardwright.statistics import comm_stats, report, stats
from shardwright.step import StepOutput, step
from shardwright.tensor_parallel.marking import model_creation, set_tensor_parallelism, tensor_parallelism
from shardwright.tensor_parallel.registry import tp_register, tp_register_with_module
from shardwright.timeline import profile, trace
from shardwright.values import register_type
from shardwright.verify import verify

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "AveragedModel",
    "CheckpointError",
    "CheckpointGoneError",
    "CommGroup",
    "ConfigError",
    "DepartureError",
    "DistributedModel",
    "DistributedOptimizer",
    "DistributedSampler",
    "FrameError",
    "JobStartError",
    "LeftOutError",
    "NotOwnedError",
    "PartialUpdateError",
    "PartitionError",
    "PeerLostError",
    "RankType",
    "RemoteError",
    "ShardwrightError",
    "StallError",
    "StepMismatchError",
    "StepOutput",
    "UnsupportedValueError",
    "VerificationError",
    "__version__",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "checkpoint",
    "checkpoint_sequential",
    "clip_grad_norm_",
    "comm_stats",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "export_torch_checkpoint",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "import_torch_checkpoint",
    "init",
    "is_initialized",
    "is_tracing",
    "keep_float32",
    "load",
    "local_rank",
    "local_size",
    "memory_report",
    "model",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "notebook",
    "optimizers",
    "partition",
    "pp_rank",
    "pp_size",
    "profile",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "register_type",
    "report",
    "resume_after_failure",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "shutdown",
    "size",
    "state",
    "stats",
    "step",
    "tensor_parallelism",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
    "trace",
    "verify",
]
