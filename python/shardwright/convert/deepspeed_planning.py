"""The plan of a job, of what a configuration of DeepSpeed says."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.convert.plan import Engine, LossScale, Optimizer, Plan, Sharding
from shardwright.convert.values import Section, shortened
from shardwright.errors import ConfigError

_MOST_STAGE = 3
#: Of a number that float32 has.
_MOST_POWER = 127
#: Parameters with fewer elements stay whole in DeepSpeed's stage 3, where the file says nothing.
_THRESHOLD = 100_000
_DTYPES = {"float16": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
#: Arguments of DeepSpeed's Adam that torch's have too.
ADAM = ("lr", "betas", "eps", "weight_decay")
#: Those that choose an implementation.
ADAM_KIND = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "set_grad_none")


def plan_alone(given: Section, ranks: int | None) -> Plan:
    """Return the plan of a file of DeepSpeed by itself, for a script with DeepSpeed's engine."""
    micro = given.whole("train_micro_batch_size_per_gpu", 0, fewest=1)
    steps = given.whole("gradient_accumulation_steps", 0, fewest=1)
    whole = given.whole("train_batch_size", 0, fewest=1)
    if ranks is None and (not whole or not micro or whole % (micro * (steps or 1))):
        raise ConfigError(
            "the file does not say how many processes there are, which are train_batch_size divided by "
            "train_micro_batch_size_per_gpu and gradient_accumulation_steps: give --num-processes"
        )
    if ranks is None:
        ranks = whole // (micro * (steps or 1))
    plan = Plan(Engine.DEEPSPEED, has_accelerator=False, ranks=ranks)
    plan_deepspeed(plan, given, "no")
    plan.microbatches = plan.accumulation or 1
    return plan


def plan_inline(plan: Plan, given: Section, precision: str) -> None:
    """Add what accelerate's own keys of DeepSpeed say."""
    plan.precision = precision
    _share_stage(plan, _stage(given.whole("zero_stage", 2)))
    if plan.sharding is Sharding.PARAMETERS and plan.asked_stage == _MOST_STAGE:
        plan.threshold = _THRESHOLD
    if given.get("gradient_clipping") is None:
        plan.unsaid["deepspeed_config.gradient_clipping"] = (
            "accelerate lets DeepSpeed clip by 1.0 where the file does not say it"
        )
    plan.clipping = given.number("gradient_clipping", 1.0) or None
    plan.accumulation = given.whole("gradient_accumulation_steps", 0, fewest=1) or None
    _offload(plan, given.text("offload_optimizer_device"), given.text("offload_optimizer_nvme_path"))
    if plan.precision == "fp16" and plan.is_cast:
        plan.loss_scale = LossScale()


def plan_deepspeed(plan: Plan, given: Section, precision: str) -> None:
    """Add what a file of DeepSpeed says.

    Args:
        plan: The plan.
        given: The keys of the file.
        precision: What accelerate is asked for, which counts where the file leaves it open.
    """
    zero = given.within("zero_optimization")
    plan.tensor = max(plan.tensor, given.within("tensor_parallel").whole("autotp_size", 1))
    plan.others = max(plan.others, given.whole("sequence_parallel_size", 1, fewest=1))
    autocast = given.within("torch_autocast")
    is_autocast = autocast.flag("enabled")
    plan.precision = _autocast_dtype(autocast) if is_autocast else _precision(given, precision)
    _share_stage(plan, _stage(zero.whole("stage", 0)), max(0, zero.whole("mics_shard_size", 0)))
    plan.is_cast = plan.is_cast and not is_autocast
    _plan_loss_scale(plan, given.within("fp16"))
    accumulates_float32 = given.within("data_types").text("grad_accum_dtype") in ("fp32", "float32")
    plan.float32_gradients = accumulates_float32 and plan.is_cast and plan.sharding is not Sharding.PARAMETERS

    default = 1.0 if plan.has_accelerator and given.entries.get("gradient_clipping") == "auto" else 0.0
    plan.clipping = given.number("gradient_clipping", default) or None
    _plan_batches(plan, given)
    offload = zero.within("offload_optimizer")
    device = offload.text("device") or ("cpu" if zero.flag("cpu_offload") else "")
    _offload(plan, device, offload.text("nvme_path"))
    if plan.sharding is Sharding.PARAMETERS:
        plan.bucket = zero.whole("reduce_bucket_size", 0, fewest=1) or None
        plan.is_hierarchical = True if zero.flag("mics_hierarchical_params_gather") else None
        if plan.asked_stage == _MOST_STAGE:
            plan.live = zero.whole("stage3_max_live_parameters", 0) or None
            if zero.entries.get("stage3_param_persistence_threshold") != "auto":
                plan.threshold = zero.whole("stage3_param_persistence_threshold", _THRESHOLD)
    plan.offload_activations = given.within("activation_checkpointing").flag("cpu_checkpointing")
    plan.optimizer = _optimizer(given.within("optimizer"))


def share(plan: Plan, stage: int, shards: int) -> None:
    """Let replicas divide what a stage says, as far as the precision and other degrees allow it."""
    plan.asked_stage = stage
    if stage == 0 or plan.replicas == 1:
        return
    # Only parameters in float32 and bfloat16 are divided, and only without tensor parallelism.
    of_state = stage == 1 or plan.tensor > 1
    plan.sharding = Sharding.STATE if of_state else Sharding.PARAMETERS
    plan.shards = 1 if of_state else shards


def _share_stage(plan: Plan, stage: int, shards: int = 0) -> None:
    share(plan, stage, shards or plan.replicas)
    if plan.precision == "fp16" and plan.sharding is Sharding.PARAMETERS and stage < _MOST_STAGE:
        plan.sharding, plan.shards = Sharding.STATE, 1
    plan.is_cast = plan.precision == "bf16" or (plan.precision == "fp16" and plan.sharding is not Sharding.PARAMETERS)


def _stage(number: int) -> int:
    if number > _MOST_STAGE:
        raise ConfigError(f"the stage of ZeRO is {number}; allowed: 0 to {_MOST_STAGE}")
    return number


def _precision(given: Section, asked: str) -> str:
    """Return the precision of the sections ``fp16`` and ``bf16``; what is asked for where they leave it open."""
    sections = {"fp16": given.within("fp16"), "bf16": given.within("bf16" if given.get("bf16") else "bfloat16")}
    on = [name for name, section in sections.items() if section.flag("enabled")]
    if len(on) > 1:
        raise ConfigError("fp16 and bf16 are both enabled; allowed: one of them")
    if on:
        return on[0]
    is_open = asked != "no" and (not sections[asked].entries or sections[asked].entries.get("enabled") == "auto")
    return asked if is_open else "no"


def _autocast_dtype(autocast: Section) -> str:
    name = autocast.text("dtype", "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"the key torch_autocast.dtype is {shortened(name)}; allowed: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _plan_loss_scale(plan: Plan, fp16: Section) -> None:
    if plan.precision != "fp16":
        return
    power = fp16.whole("initial_scale_power", 16)
    if power > _MOST_POWER:
        raise ConfigError(f"the key fp16.initial_scale_power is {power}; allowed: 0 to {_MOST_POWER}")
    plan.loss_scale = LossScale(
        static=fp16.number("loss_scale", 0.0),
        power=power,
        window=fp16.whole("loss_scale_window", 1000, fewest=1),
        hysteresis=fp16.whole("hysteresis", 2, fewest=1),
        consecutive=fp16.flag("consecutive_hysteresis"),
        least=fp16.number("min_loss_scale", 1.0),
    )


def _plan_batches(plan: Plan, given: Section) -> None:
    """Let what is missing follow from the rest, as DeepSpeed does."""
    micro = given.whole("train_micro_batch_size_per_gpu", 0, fewest=1)
    steps = given.whole("gradient_accumulation_steps", 0, fewest=1)
    whole = given.whole("train_batch_size", 0, fewest=1)
    is_open = given.entries.get("gradient_accumulation_steps") == "auto"
    if not steps and not is_open:
        steps = max(1, whole // (micro * plan.replicas)) if whole and micro else 1
    if whole and not micro and given.entries.get("train_micro_batch_size_per_gpu") != "auto":
        micro = max(1, whole // (plan.replicas * (steps or 1)))
    plan.accumulation, plan.micro_batch, plan.train_batch = steps or None, micro or None, whole or None


def _offload(plan: Plan, device: str, path: str) -> None:
    if device == "cpu":
        plan.offload_optimizer = True
    elif device == "nvme":
        plan.offload_optimizer = "disk"
        plan.offload_directory = path if path not in ("", "none") else None


def _optimizer(section: Section) -> Optimizer | None:
    """Return the class of torch that DeepSpeed's name stands for; None for those that are not here."""
    name, given = section.text("type"), section.within("params")
    arguments: dict[str, Any] = {key: value for key, value in given.entries.items() if value is not None}
    if name.lower() in ("adam", "adamw"):
        is_decoupled = name.lower() == "adamw" or given.flag("adam_w_mode", True)
        kept = {key: value for key, value in arguments.items() if key in ADAM}
        if not given.flag("torch_adam"):
            kept.setdefault("weight_decay", 0.0)  # the default of DeepSpeed's own; that of torch's is another
        return Optimizer(f"torch.optim.{'AdamW' if is_decoupled else 'Adam'}", kept)
    name = "Adagrad" if name.lower() == "adagrad" else name
    found = getattr(torch.optim, name, None) if name else None
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        return Optimizer(f"torch.optim.{name}", arguments)
    return None
