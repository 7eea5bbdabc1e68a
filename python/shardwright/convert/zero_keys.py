"""What becomes of the keys of ZeRO, DeepSpeed's sharded data parallelism."""

from __future__ import annotations

from typing import Any

from shardwright.convert.engine_keys import sharding_told
from shardwright.convert.keys import Key, Told, becomes, drop, key, lack, lacking, not_needed
from shardwright.convert.plan import Plan, Sharding
from shardwright.convert.values import is_off

_SPEED = "it changes speed only"
_LAST_STAGE = 3


def _of_sharding(name: str, attribute: str, only_last: bool = False) -> Any:
    """Return what becomes of a number that sharded data parallelism has too."""

    def read(plan: Plan, value: Any) -> Told:
        if value == "auto":
            return drop("it is left to the default: results do not depend on it")
        if plan.sharding is not Sharding.PARAMETERS or (only_last and plan.asked_stage != _LAST_STAGE):
            return drop("parameters are not sharded in a step")
        number = getattr(plan, attribute)
        return drop("nothing is given") if number is None else becomes(f'`"{name}": {number}`')

    return read


def offload_optimizer(plan: Plan, value: Any) -> Told:
    """Return what stands for offloading of the optimizer's state."""
    if is_off(value):
        return drop("it is off")
    if plan.offload_optimizer == "disk":
        return becomes('`"offload_optimizer": "disk"`')
    if plan.offload_optimizer:
        return becomes('`"offload_optimizer": True`')
    return lack("DeepSpeed does not know such a place; `cpu` and `nvme` are taken")


def offload_param(plan: Plan, value: Any) -> Told:
    """Return what stands for offloading of parameters."""
    return drop("it is off") if is_off(value) else lack("parameters stay on the device")


def offload_path(plan: Plan, value: Any) -> Told:
    """Return what stands for the directory of what is offloaded."""
    if plan.offload_directory is None:
        return drop("nothing is offloaded to it")
    return becomes(f'`"offload_directory": "{plan.offload_directory}"`')


def _offload_bool(plan: Plan, value: Any) -> Told:
    return drop("it is off") if is_off(value) else offload_optimizer(plan, "cpu")


def _hpz(plan: Plan, value: Any) -> Told:
    if str(value) in ("0", "1"):
        return drop("it is off")
    return drop(
        "results are the same: a second copy of shards on each host, for which `sdp_hierarchical_allgather`, the "
        "default, gathers between hosts once for all ranks of a host"
    )


def _mics(plan: Plan, value: Any) -> Told:
    if str(value) in ("-1", "0"):
        return drop("it is off")
    return sharding_told(plan)


def _hierarchical(plan: Plan, value: Any) -> Told:
    if plan.is_hierarchical:
        return becomes('`"sdp_hierarchical_allgather": True`, the default')
    return drop("it changes speed only")


_Q = "values are sent as they are, and not quantized"

#: Of ``zero_optimization``.
ZERO: tuple[Key, ...] = (
    key(
        "zero_optimization.stage",
        "0: `ddp`. 1: `shard_optimizer_state`. 2 and 3: `sharded_data_parallel_degree` and `sdp_stage`; with float16 "
        "2 is `shard_optimizer_state`, which gives each rank the gradients of its share only, and 3 computes under "
        "autocast; with tensor parallelism 2 and 3 are `shard_optimizer_state`, which for 3 is no counterpart",
        lambda plan, value: sharding_told(plan),
    ),
    key(
        "zero_optimization.reduce_bucket_size",
        "`sdp_reduce_bucket_size`",
        _of_sharding("sdp_reduce_bucket_size", "bucket"),
    ),
    key(
        "zero_optimization.stage3_param_persistence_threshold",
        "`sdp_param_persistence_threshold`; 100,000 where it is missing",
        _of_sharding("sdp_param_persistence_threshold", "threshold", only_last=True),
    ),
    key(
        "zero_optimization.stage3_max_live_parameters",
        "`sdp_max_live_parameters`",
        _of_sharding("sdp_max_live_parameters", "live", only_last=True),
    ),
    key(
        "zero_optimization.offload_optimizer.device",
        "`offload_optimizer`: true for `cpu`, `disk` for `nvme`",
        offload_optimizer,
    ),
    key("zero_optimization.offload_optimizer.nvme_path", "`offload_directory`", offload_path),
    not_needed("zero_optimization.offload_optimizer", _SPEED),
    key("zero_optimization.cpu_offload", "`offload_optimizer`", _offload_bool),
    key(
        "zero_optimization.offload_param.device zero_optimization.cpu_offload_param "
        "zero_optimization.cpu_offload_params",
        "no counterpart: parameters stay on the device",
        offload_param,
    ),
    not_needed("zero_optimization.offload_param", "see its `device`"),
    not_needed("zero_optimization.cpu_offload_use_pin_memory", _SPEED),
    key(
        "zero_optimization.zero_hpz_partition_size",
        "not needed: results are the same; `sdp_hierarchical_allgather` gathers between hosts once for each host",
        _hpz,
    ),
    lacking("zero_optimization.zero_quantized_weights", _Q),
    lacking("zero_optimization.zero_quantized_nontrainable_weights", _Q),
    lacking("zero_optimization.zero_quantized_gradients", _Q),
    lacking("zero_optimization.zeropp_loco_param", _Q),
    key("zero_optimization.mics_shard_size", "`sharded_data_parallel_degree`", _mics),
    key(
        "zero_optimization.mics_hierarchical_params_gather",
        "`sdp_hierarchical_allgather`",
        _hierarchical,
    ),
    lacking("zero_optimization.zenflow", "updates wait for all gradients of their step"),
    *(
        not_needed(f"zero_optimization.{name}", _SPEED)
        for name in (
            "allgather_partitions",
            "allgather_bucket_size",
            "allgather_sequential",
            "overlap_comm",
            "reduce_scatter",
            "contiguous_gradients",
            "use_multi_rank_bucket_allreduce",
            "round_robin_gradients",
            "sub_group_size",
            "stage3_prefetch_bucket_size",
            "stage3_model_persistence_threshold",
            "stage3_max_reuse_distance",
            "stage3_module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
            "memory_efficient_linear",
            "parameter_alignment",
            "leaf_module",
            "legacy_stage1",
            "override_module_apply",
            "save_muon_momentum_buffer_in_memory",
        )
    ),
    not_needed(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save "
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "`model.state_dict()` is whole",
    ),
    *(
        not_needed(f"zero_optimization.{name}", "checkpoints are loaded under any degrees")
        for name in ("elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint")
    ),
    not_needed("zero_optimization.ignore_unused_parameters", "a parameter that is not used counts as a zero gradient"),
    *(
        not_needed(f"zero_optimization.{name}", "it checks or logs only")
        for name in ("compute_grad_norm", "log_trace_cache_warnings", "enable_sanity_checks")
    ),
)
