"""What becomes of the keys of DeepSpeed: accelerate's own, and those of a file of DeepSpeed but for ZeRO's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.convert.accelerate_keys import precision_text
from shardwright.convert.deepspeed_planning import ADAM, ADAM_KIND
from shardwright.convert.engine_keys import clipping_told, sharding_told
from shardwright.convert.keys import Key, Told, becomes, drop, key, lack, lacking, left_to_script, not_needed
from shardwright.convert.plan import Plan, Sharding
from shardwright.convert.values import is_off
from shardwright.convert.zero_keys import ZERO, offload_optimizer, offload_param, offload_path

_LAUNCHED = "`shardwright run` is started on each host"


def _stage(plan: Plan, value: Any) -> Told:
    return sharding_told(plan)


def _accumulation(plan: Plan, value: Any) -> Told:
    if plan.accumulation is None:
        return drop("the script says it: `Accelerator(gradient_accumulation_steps=...)`")
    if plan.has_accelerator:
        return becomes(f"`Accelerator(gradient_accumulation_steps={plan.accumulation})`")
    return becomes(f'`"microbatches": {plan.microbatches}`: the batch of a step is divided into so many')


def _delayed(plan: Plan, value: Any) -> Told:
    if is_off(value):
        return drop("it is off")
    if not plan.is_delayed:
        return drop("DeepSpeed has it in stage 3 only")
    return becomes('`"delayed_parameter_initialization": True`, and `smp.model_creation()` where the model is created')


#: Of accelerate's ``deepspeed_config``.
INLINE: tuple[Key, ...] = (
    key("zero_stage", "see `zero_optimization.stage`; 2 where it is missing", _stage),
    key("gradient_accumulation_steps", "`Accelerator(gradient_accumulation_steps=...)`", _accumulation),
    key("gradient_clipping", "see `gradient_clipping` of DeepSpeed's file; 1.0 where it is missing", clipping_told),
    key("offload_optimizer_device", "`offload_optimizer`: true for `cpu`, `disk` for `nvme`", offload_optimizer),
    key("offload_param_device", "no counterpart: parameters stay on the device", offload_param),
    key("offload_optimizer_nvme_path", "`offload_directory`", offload_path),
    not_needed("offload_param_nvme_path", "parameters stay on the device"),
    key("zero3_init_flag", "`delayed_parameter_initialization`, with `smp.model_creation()`", _delayed),
    not_needed("zero3_save_16bit_model", "`model.state_dict()` is whole"),
    not_needed("deepspeed_moe_layer_cls_names", "replicas may use different experts"),
    not_needed("deepspeed_multinode_launcher", _LAUNCHED),
    not_needed("deepspeed_hostfile", _LAUNCHED),
    not_needed("deepspeed_exclusion_filter", _LAUNCHED),
    not_needed("deepspeed_inclusion_filter", _LAUNCHED),
    not_needed("deepspeed_config_file", "its keys are below"),
)
#: Those that DeepSpeed's file says, where there is one; accelerate takes them in one place only.
OF_FILE = frozenset(
    name
    for each in INLINE
    for name in each.names
    if name.startswith(("zero_stage", "gradient_", "offload_", "zero3_save"))
)


def _micro_batch(plan: Plan, value: Any) -> Told:
    if plan.has_accelerator:
        return becomes(f"`batch_size={plan.micro_batch}` of the script's `DataLoader`")
    steps = plan.microbatches
    return becomes(
        f"`batch_size={(plan.micro_batch or 1) * steps}` of the script's `DataLoader`, in {steps} microbatches"
    )


def _train_batch(plan: Plan, value: Any) -> Told:
    if plan.samples is None:
        return becomes(f"the samples of {plan.replicas} replicas for one update: the script's `DataLoader` says it")
    said = f"{plan.micro_batch} x {plan.accumulation or 1} steps x {plan.replicas} replicas = {plan.samples}"
    if plan.train_batch == plan.samples:
        return becomes(f"{said} samples for one update")
    return lack(f"{said} samples for one update, as DeepSpeed checks too")


def _enabled(name: str) -> Any:
    def read(plan: Plan, value: Any) -> Told:
        if value == "auto":
            said = precision_text(plan) if plan.precision == name else "another precision"
            return drop(f"`mixed_precision` says it: {said}")
        if is_off(value):
            return drop("it is off")
        if name == "fp16" and plan.sharding is Sharding.PARAMETERS:
            return becomes(f"{precision_text(plan)}: float16 parameters cannot be sharded, those that are have float32")
        return becomes(precision_text(plan))

    return read


def _autocast(plan: Plan, value: Any) -> Told:
    return drop("it is off") if is_off(value) else becomes(precision_text(plan))


def _loss_scale(setting: str, of_scaler: str) -> Any:
    """Return what becomes of a setting of float16, under a cast model and under autocast."""

    def read(plan: Plan, value: Any) -> Told:
        if plan.loss_scale is None:
            return drop("the precision is not float16")
        is_static = setting == "static_loss_scale"
        if plan.is_cast:
            if is_static != bool(plan.loss_scale.static):
                return becomes("`dynamic_loss_scale=True`") if is_static else drop("the scale is fixed")
            where = "of `smp.DistributedOptimizer`" if is_static else "in `dynamic_loss_args`"
            return becomes(f"`{setting}` {where}")
        if of_scaler:
            return becomes(f"`{of_scaler}` of `GradScaler`")
        if is_static:
            return lack("autocast has no fixed scale") if plan.loss_scale.static else drop("the scale is dynamic")
        return drop("`GradScaler` halves the scale with every overflow: another scale then, the same gradients")

    return read


def _float32_gradients(plan: Plan, value: Any) -> Told:
    if value not in ("fp32", "float32"):
        return drop("gradients have the dtype of the parameters")
    if plan.float32_gradients:
        return becomes('`"_fp32_grad_accumulation": True`')
    if plan.is_cast:
        return lack("gradients of shards have the dtype of parameters")
    return drop("gradients are float32")


def _sum(plan: Plan, value: Any) -> Told:
    if str(value).lower() in ("mean", "avg", "average"):
        return drop("gradients are averaged over replicas")
    return lack("gradients are averaged over replicas: multiply the loss by their number")


def _cpu_checkpointing(plan: Plan, value: Any) -> Told:
    return becomes('`"offload_activations": True`') if plan.offload_activations else drop("it is off")


def _section(names: str, why: str) -> Key:
    """A mapping of the file whose feature is not here."""

    def read(plan: Plan, value: Any) -> Told:
        is_on = value.get("enabled", False) if isinstance(value, Mapping) else value
        return drop("it is off") if is_off(is_on) else lack(why)

    return Key(tuple(names.split()), f"no counterpart unless it is off: {why}", read)


def _optimizer_type(plan: Plan, value: Any) -> Told:
    if plan.optimizer is None:
        return lack("create an optimizer in the script; DeepSpeed's own are not here")
    return becomes(f"`{plan.optimizer.name}(model.parameters(), ...)` in the script")


def _optimizer_argument(name: str) -> Key:
    def read(plan: Plan, value: Any) -> Told:
        if plan.optimizer is None:
            return lack("see `optimizer.type`")
        if value == "auto":
            return becomes(f"`{name}={name}` of the optimizer, as the script has it")
        return becomes(f"`{name}` of the optimizer")

    return key(f"optimizer.params.{name}", "the same argument of the optimizer", read)


def _other_argument(plan: Plan, value: Any) -> Told:
    if plan.optimizer is None:
        return lack("see `optimizer.type`")
    if plan.optimizer.is_adam:
        return lack("an argument that torch's Adam does not have")
    return becomes("the same argument of the optimizer")


def _of_adam(name: str, harmless: bool) -> Key:
    """A flag of DeepSpeed's Adam, which torch's has as one value only."""

    def read(plan: Plan, value: Any) -> Told:
        if plan.optimizer is not None and not plan.optimizer.is_adam:
            return becomes("the same argument of the optimizer")
        return drop("torch's Adam does so") if value is harmless else lack("torch's Adam does not do so")

    return key(f"optimizer.params.{name}", f"not needed where it is {str(harmless).lower()}, else no counterpart", read)


def _drop_last(plan: Plan, value: Any) -> Told:
    return drop("it is off") if is_off(value) else becomes("`drop_last=True` of the script's `DataLoader`")


_SCHEDULER = "create a scheduler of `torch.optim.lr_scheduler` in the script, and advance it with each update"
_LOGGED = "the script logs, and `smp.trace` records what ranks do"

#: Of a file of DeepSpeed; a mapping whose keys are not listed is here itself.
DEEPSPEED: tuple[Key, ...] = (
    key(
        "train_batch_size",
        "checked: samples of a microbatch x `gradient_accumulation_steps` x replicas",
        lambda plan, value: left_to_script(value) or _train_batch(plan, value),
    ),
    key(
        "train_micro_batch_size_per_gpu",
        "`batch_size` of the `DataLoader`: with an `Accelerator` the same, else times `microbatches`",
        lambda plan, value: left_to_script(value) or _micro_batch(plan, value),
    ),
    key(
        "gradient_accumulation_steps",
        "`Accelerator(gradient_accumulation_steps=...)`; `microbatches` in a script without one",
        _accumulation,
    ),
    not_needed(
        "managed_gradient_accumulation", "`accelerator.accumulate`, or `microbatches`, says when gradients add up"
    ),
    key(
        "gradient_clipping",
        "`sdp_gradient_clipping` where parameters are sharded; else `accelerator.clip_grad_norm_`, or without an "
        "`Accelerator` `smp.clip_grad_norm_` (`optimizer.clip_master_grads` with `fp16` and `bf16`). "
        "`auto` is 1.0 with accelerate",
        clipping_told,
    ),
    key("fp16.enabled", "`fp16`; autocast in float16 with sharded parameters", _enabled("fp16")),
    key(
        "fp16.loss_scale",
        "`static_loss_scale` of `smp.DistributedOptimizer`; 0 is `dynamic_loss_scale`",
        _loss_scale("static_loss_scale", ""),
    ),
    key(
        "fp16.initial_scale_power",
        "`init_scale` of `dynamic_loss_args`, 2 to that power",
        _loss_scale("init_scale", "init_scale"),
    ),
    key(
        "fp16.loss_scale_window",
        "`scale_window` of `dynamic_loss_args`",
        _loss_scale("scale_window", "growth_interval"),
    ),
    key("fp16.hysteresis", "`delayed_shift` of `dynamic_loss_args`", _loss_scale("delayed_shift", "")),
    key(
        "fp16.consecutive_hysteresis",
        "`consecutive_hysteresis` of `dynamic_loss_args`",
        _loss_scale("consecutive_hysteresis", ""),
    ),
    key("fp16.min_loss_scale", "`min_scale` of `dynamic_loss_args`", _loss_scale("min_scale", "")),
    not_needed("fp16.auto_cast", "the model casts its arguments"),
    lacking("fp16.fp16_master_weights_and_grads", "master weights are float32"),
    key("bf16.enabled bfloat16.enabled", "`bf16`", _enabled("bf16")),
    not_needed("bf16.immediate_grad_update bfloat16.immediate_grad_update", "it changes when memory is used"),
    lacking("bf16.check_grad_overflow bfloat16.check_grad_overflow", "only float16 skips updates that overflow"),
    lacking("bf16.bf16_master_weights_and_grads bfloat16.bf16_master_weights_and_grads", "master weights are float32"),
    lacking("bf16.bf16_optimizer_states bfloat16.bf16_optimizer_states", "the optimizer's state is float32"),
    key("torch_autocast.enabled", "`Accelerator(mixed_precision=...)`, or `torch.autocast`", _autocast),
    not_needed("torch_autocast.dtype", "see `torch_autocast.enabled`"),
    lacking("torch_autocast.lower_precision_safe_modules", "autocast chooses by operation"),
    _section("amp", "apex is not here; use `fp16`"),
    key("data_types.grad_accum_dtype", "`_fp32_grad_accumulation` for `fp32`", _float32_gradients),
    lacking("data_types.param_dtype data_types.buffer_dtype", "`fp16` and `bf16` cast parameters and buffers"),
    lacking("data_types.keep_in_fp32_modules", "`smp.keep_float32(module)` before `smp.DistributedModel`", ["auto"]),
    not_needed(
        "communication_data_type seq_parallel_communication_data_type", "gradients are reduced in their own dtype"
    ),
    not_needed("prescale_gradients gradient_predivide_factor", "gradients are averaged over replicas"),
    key("gradient_allreduce_op", "not needed for `mean`; no counterpart for `sum`", _sum),
    not_needed("sparse_gradients", "sparse gradients are reduced as such"),
    not_needed("disable_allgather", "it changes speed only"),
    key("optimizer.type", "a class of `torch.optim`; no counterpart for DeepSpeed's own", _optimizer_type),
    *(_optimizer_argument(name) for name in ADAM),
    *(
        not_needed(f"optimizer.params.{name}", "it chooses an implementation, or is the optimizer's default")
        for name in ADAM_KIND
    ),
    _of_adam("bias_correction", True),
    _of_adam("amsgrad", False),
    not_needed("optimizer.legacy_fusion", "it chooses an implementation"),
    key("optimizer.params", "the same arguments of the optimizer; no counterpart for others of Adam", _other_argument),
    lacking("scheduler", _SCHEDULER),
    *ZERO,
    not_needed("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "any optimizer of torch is taken"),
    not_needed("activation_checkpointing.partition_activations", "each rank keeps its own"),
    key("activation_checkpointing.cpu_checkpointing", "`offload_activations`", _cpu_checkpointing),
    not_needed(
        "activation_checkpointing", "`smp.set_activation_checkpointing` and `smp.checkpoint` need no such setting"
    ),
    key(
        "tensor_parallel",
        "`tensor_parallel_degree`, with `prescaled_batch`",
        lambda plan, value: (
            drop("1 divides nothing")
            if plan.tensor == 1
            else becomes(f'`"tensor_parallel_degree": {plan.tensor}, "prescaled_batch": True`')
        ),
    ),
    lacking("sequence_parallel_size", "sequences are not divided over ranks", [1, "1"]),
    _section("expert_parallel", "experts are divided by `tensor_parallel_degree`"),
    not_needed("use_data_before_expert_parallelism", "experts are divided by `tensor_parallel_degree`"),
    lacking("pipeline", "`pipeline_parallel_degree`, and the model as it is in place of `PipelineModule`"),
    _section("elasticity", "batches keep their size; `elastic_degrees` lets a job go on with fewer ranks"),
    _section("data_efficiency curriculum_learning random_ltd", "the script chooses samples and lengths"),
    _section("progressive_layer_drop", "layers are not dropped"),
    _section("eigenvalue quantize_training weight_quantization", "weights are not quantized while training"),
    lacking("compression_training", "weights are not compressed"),
    lacking("sparse_attention", "attention is that of the model"),
    _section("hybrid_engine", "there is no engine for inference"),
    _section("msamp", "float8 is not here; use `bf16`"),
    not_needed("autotuning", "it searches for settings; `smp.memory_report` and `pipeline: auto` help here"),
    not_needed("compile disable_compile", "it changes speed only"),
    not_needed("aio", "it changes speed only"),
    not_needed("checkpoint datastates nebula", "checkpoints are loaded under any degrees"),
    key("dataloader_drop_last", "`drop_last=True` of the script's `DataLoader`", _drop_last),
    not_needed("steps_per_print wall_clock_breakdown memory_breakdown dump_state timers log_level", _LOGGED),
    not_needed("tensorboard wandb csv_monitor comet monitor_config comms_logger flops_profiler", _LOGGED),
    not_needed("disable_python_gc", "it changes speed only"),
    not_needed("vocabulary_size", "it warns only"),
)
