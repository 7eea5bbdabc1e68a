"""What becomes of the keys of FSDP, of ``parallelism_config`` and of Megatron-LM in a file of accelerate."""

from __future__ import annotations

from typing import Any

from shardwright.convert.keys import Key, Outcome, Told, becomes, drop, key, lack, lacking, not_needed
from shardwright.convert.plan import Plan, Sharding
from shardwright.convert.values import is_off

_ONE_REPLICA = "there is one replica, which shares with nobody"


def sharding_told(plan: Plan) -> Told:
    """Return what stands for what replicas divide among them."""
    if plan.asked_stage == 0:
        return drop("replicas divide nothing") if plan.ranks == 1 else becomes('`"ddp": True`, which divides nothing')
    if plan.replicas == 1:
        return drop(_ONE_REPLICA)
    if plan.sharding is Sharding.PARAMETERS:
        return becomes(f'`"sharded_data_parallel_degree": {plan.shards}, "sdp_stage": {plan.asked_stage}`')
    text = '`"shard_optimizer_state": True`'
    if plan.asked_stage == 1:
        return becomes(text)
    if plan.asked_stage == 2:
        return becomes(f"{text}, with which each rank gets the gradients of its share only")
    return lack(f"{text} in its place: parameters are not sharded together with tensor parallelism")


def _offload(plan: Plan, value: Any) -> Told:
    if is_off(value):
        return drop("it is off")
    return lack('`"offload_optimizer": True` for the state; parameters and gradients stay on the device')


def _checkpointing(plan: Plan, value: Any) -> Told:
    return drop("it is off") if plan.checkpointed is None else becomes("`smp.set_activation_checkpointing`")


def _offload_activations(plan: Plan, value: Any) -> Told:
    if is_off(value):
        return drop("it is off")
    if plan.checkpointed is None:
        return drop("nothing is checkpointed")
    return becomes('`"offload_activations": True`')


_UNITS = "modules in lists and sequences are sharded one by one"
_PREFETCHED = "`sdp_max_live_parameters` says how much is gathered ahead"

#: Of ``fsdp_config``.
FSDP: tuple[Key, ...] = (
    not_needed("fsdp_version", "both become PyTorch's `fully_shard` (FSDP2) underneath"),
    key(
        "fsdp_sharding_strategy",
        "`sharded_data_parallel_degree` and `sdp_stage`: 3 for `FULL_SHARD`, 2 for `SHARD_GRAD_OP`, neither for "
        "`NO_SHARD`; the degree of `HYBRID_SHARD` and `HYBRID_SHARD_ZERO2` is the number of ranks of a host",
        lambda plan, value: sharding_told(plan),
    ),
    key(
        "fsdp_reshard_after_forward",
        "`sdp_stage`: 3 where it is true, else 2; with FSDP 1 as `fsdp_sharding_strategy`, whose values it has there",
        lambda plan, value: sharding_told(plan),
    ),
    key("fsdp_offload_params", "`offload_optimizer`; no counterpart for parameters and gradients", _offload),
    not_needed("fsdp_auto_wrap_policy", _UNITS),
    not_needed("fsdp_transformer_layer_cls_to_wrap", f"{_UNITS}; activation checkpointing uses the names"),
    not_needed("fsdp_min_num_params", _UNITS),
    not_needed("fsdp_backward_prefetch", _PREFETCHED),
    not_needed("fsdp_forward_prefetch", _PREFETCHED),
    not_needed("fsdp_state_dict_type", "`model.state_dict()` is whole, `accelerator.save_state` writes shards"),
    not_needed("fsdp_use_orig_params", "parameters are the original ones"),
    not_needed("fsdp_cpu_ram_efficient_loading", "it changes what loading takes of host memory only"),
    not_needed("fsdp_sync_module_states", "the first replica's parameters and buffers are sent to the others"),
    key("fsdp_activation_checkpointing", "`smp.set_activation_checkpointing`", _checkpointing),
    key("fsdp_activation_checkpointing_offload", "`offload_activations`", _offload_activations),
    lacking("fsdp_ignored_modules", "all parameters of the model are sharded"),
)


def _tensor(plan: Plan, value: Any) -> Told:
    if plan.tensor == 1:
        return drop("1 divides nothing")
    return becomes(
        f'`"tensor_parallel_degree": {plan.tensor}, "prescaled_batch": True`, and `smp.tensor_parallelism()` where '
        "the model is created"
    )


def _groups(plan: Plan, value: Any) -> Told:
    if plan.is_uneven:
        return lack(
            f"the product of dp_replicate_size and dp_shard_size is not {plan.replicas}, the number of replicas; "
            "accelerate refuses it too"
        )
    if str(value) == "1":
        return drop("1 divides nothing")
    return becomes(f'`"ddp": True`, with {plan.replicas} replicas')


def _shard_size(plan: Plan, value: Any) -> Told:
    told = _groups(plan, value)
    return sharding_told(plan) if told[0] is Outcome.BECOMES else told


_NO_SEQUENCE = "sequences are not divided over ranks"
_WITHOUT = "it says how sequences are divided, which `cp_size` and `sp_size` ask for"

#: Of ``parallelism_config``.
PARALLELISM: tuple[Key, ...] = (
    key("parallelism_config_dp_replicate_size", "`ddp`", _groups),
    key("parallelism_config_dp_shard_size", "`sharded_data_parallel_degree`", _shard_size),
    key("parallelism_config_tp_size", "`tensor_parallel_degree`, with `prescaled_batch`", _tensor),
    lacking("parallelism_config_cp_size", _NO_SEQUENCE, [1, "1"]),
    lacking("parallelism_config_sp_size", _NO_SEQUENCE, [1, "1"]),
    *(
        not_needed(f"parallelism_config_{name}", _WITHOUT)
        for name in (
            "cp_backend",
            "cp_comm_strategy",
            "sp_backend",
            "sp_seq_length",
            "sp_seq_length_is_variable",
            "sp_attn_implementation",
        )
    ),
)


def _pipeline(plan: Plan, value: Any) -> Told:
    if plan.pipeline == 1:
        return drop("1 divides nothing")
    return becomes(f'`"pipeline_parallel_degree": {plan.pipeline}`')


def _microbatches(plan: Plan, value: Any) -> Told:
    return becomes(
        f'`"microbatches": {plan.microbatches}`; the batch of a step is so many times that of Megatron\'s `DataLoader`'
    )


def _distributed_optimizer(plan: Plan, value: Any) -> Told:
    if is_off(value):
        return drop("it is off")
    return becomes('`"shard_optimizer_state": True`') if plan.sharding is Sharding.STATE else drop(_ONE_REPLICA)


def _recompute(plan: Plan, value: Any) -> Told:
    return becomes(
        f'`"checkpoint_attentions": {plan.checkpoint_attentions}`, for layers that tensor parallelism divides'
    )


def clipping_told(plan: Plan, value: Any) -> Told:
    """Return what stands for the clipping of gradients."""
    if plan.clipping is None:
        if plan.sharding is Sharding.PARAMETERS:
            return becomes('`"sdp_gradient_clipping": 1e9`, which clips nothing')
        return drop("gradients are not clipped")
    if plan.sharding is Sharding.PARAMETERS:
        return becomes(f'`"sdp_gradient_clipping": {plan.clipping}`')
    if plan.has_accelerator:
        return becomes(f"`accelerator.clip_grad_norm_(model.parameters(), {plan.clipping})`")
    call = "optimizer.clip_master_grads(" if plan.is_cast else "smp.clip_grad_norm_(model.parameters(), "
    return becomes(f"`{call}{plan.clipping})`")


def _offload_state(plan: Plan, value: Any) -> Told:
    return becomes('`"offload_optimizer": True`') if plan.offload_optimizer else drop("it is off")


_OF_MODEL = "it is said by the model's own configuration"
_NO_LAYERS = "recomputed by `smp.set_activation_checkpointing(model)`, or of layers by their names"

#: Of ``megatron_lm_config``.
MEGATRON: tuple[Key, ...] = (
    key("megatron_lm_tp_degree", "`tensor_parallel_degree`, with `prescaled_batch`", _tensor),
    key("megatron_lm_pp_degree", "`pipeline_parallel_degree`", _pipeline),
    key("megatron_lm_num_micro_batches", "`microbatches`", _microbatches),
    key("megatron_lm_gradient_clipping", "`accelerator.clip_grad_norm_`; 1.0 where it is missing", clipping_told),
    key("megatron_lm_use_distributed_optimizer", "`shard_optimizer_state`", _distributed_optimizer),
    key("megatron_lm_recompute_activations", "`checkpoint_attentions`", _recompute),
    not_needed(
        "megatron_lm_sequence_parallelism", "results are the same; `optimize` chooses how activations are divided"
    ),
    key("megatron_lm_optimizer_cpu_offload", "`offload_optimizer`", _offload_state),
    not_needed("megatron_lm_overlap_cpu_optimizer_d2h_h2d", "it changes speed only"),
    not_needed("megatron_lm_use_precision_aware_optimizer", "master weights and state are float32"),
    lacking("megatron_lm_use_custom_fsdp", "parameters are not sharded together with tensor parallelism"),
    not_needed(
        "megatron_lm_decoder_last_pipeline_num_layers", "the model is partitioned by cost, or `smp.set_partition`"
    ),
    lacking("megatron_lm_recompute_granularity", _NO_LAYERS, ["selective"]),
    not_needed("megatron_lm_recompute_method", _NO_LAYERS),
    not_needed("megatron_lm_recompute_num_layers", _NO_LAYERS),
    not_needed("megatron_lm_attention_backend", "attention is that of the model"),
    lacking("megatron_lm_expert_model_parallel_size", "experts are divided by `tensor_parallel_degree`", [1, "1"]),
    lacking("megatron_lm_expert_tensor_parallel_size", "experts are divided by `tensor_parallel_degree`", [1, "1"]),
    lacking("megatron_lm_context_parallel_size", _NO_SEQUENCE, [1, "1"]),
    lacking("megatron_lm_attention_dropout", _OF_MODEL),
    lacking("megatron_lm_hidden_dropout", _OF_MODEL),
    not_needed("megatron_lm_attention_softmax_in_fp32", _OF_MODEL),
    lacking("megatron_lm_calculate_per_token_loss", "the script's loss is averaged over microbatches"),
    not_needed("megatron_lm_use_rotary_position_embeddings", _OF_MODEL),
    lacking("megatron_lm_eod_mask_loss", "the script computes the loss"),
    not_needed("megatron_lm_no_load_optim", "`accelerator.load_state` loads what there is"),
    not_needed("megatron_lm_no_save_optim", "`accelerator.save_state` saves all"),
)
