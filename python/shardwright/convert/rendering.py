"""A plan as keys of ``smp.init``, lines of a script, and a command."""

from __future__ import annotations

import json
import shlex
from typing import Any

from shardwright import _core
from shardwright.convert.plan import LossScale, Plan, Sharding
from shardwright.convert.planning import NO_CLIPPING
from shardwright.errors import ConfigError

#: Where the file says nothing of the script.
SCRIPT = "train.py"
_PORT = 29500
#: Where the file does not say which host is the first.
_FIRST_HOST = "FIRST_HOST"


def configuration(plan: Plan) -> dict[str, Any]:
    """Return the keys of ``smp.init``."""
    is_sharded, is_split = plan.sharding is Sharding.PARAMETERS, plan.tensor > 1
    keys: dict[str, Any] = {
        "pipeline_parallel_degree": plan.pipeline if plan.pipeline > 1 else None,
        "tensor_parallel_degree": plan.tensor if is_split else None,
        "prescaled_batch": True if is_split else None,
        "microbatches": plan.microbatches if plan.microbatches > 1 else None,
        "ddp": True if plan.replicas * plan.others > 1 or is_split else None,
        "shard_optimizer_state": True if plan.sharding is Sharding.STATE else None,
        "sharded_data_parallel_degree": plan.shards if is_sharded else None,
        "sdp_stage": plan.asked_stage if is_sharded else None,
        "sdp_param_persistence_threshold": plan.threshold,
        "sdp_reduce_bucket_size": plan.bucket,
        "sdp_max_live_parameters": plan.live,
        "sdp_hierarchical_allgather": plan.is_hierarchical,
        "sdp_gradient_clipping": (plan.clipping or NO_CLIPPING) if is_sharded else None,
        plan.precision: True if plan.is_cast else None,
        "_fp32_grad_accumulation": True if plan.float32_gradients else None,
        "checkpoint_attentions": plan.checkpoint_attentions,
        "offload_activations": True if plan.offload_activations else None,
        "offload_optimizer": plan.offload_optimizer or None,
        "offload_directory": plan.offload_directory,
        "delayed_parameter_initialization": True if plan.is_delayed else None,
    }
    return {key: value for key, value in keys.items() if value is not None}


def refusal(plan: Plan) -> str | None:
    """Return why the library itself would refuse the configuration in a job of so many ranks; None if it takes it."""
    try:
        _core.Config.parse(json.dumps(configuration(plan))).check_world(plan.ranks)
    except ConfigError as error:
        return str(error)
    return None


def command(plan: Plan) -> tuple[dict[str, str], list[str]]:
    """Return the environment and the command that start the ranks of one host."""
    environment = {}
    if plan.is_cpu_only or plan.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = "" if plan.is_cpu_only else plan.devices or ""
    words = ["shardwright", "run", "--ranks", str(plan.ranks // plan.hosts)]
    if plan.hosts > 1:
        address, port = plan.address or _FIRST_HOST, str(plan.port or _PORT)
        words += ["--nnodes", str(plan.hosts)]
        if plan.rendezvous == "static":
            words += ["--node-rank", str(plan.host_rank), "--master-addr", address, "--master-port", port]
        else:
            words += ["--rdzv-backend", plan.rendezvous, "--rdzv-endpoint", f"{address}:{port}"]
    return environment, [*words, SCRIPT]


def command_line(plan: Plan) -> str:
    """Return what is typed to start the ranks of one host."""
    environment, words = command(plan)
    return " ".join(
        [
            *(f"{name}={shlex.quote(value)}" if value else f"{name}=" for name, value in environment.items()),
            shlex.join(words),
        ]
    )


def script(plan: Plan) -> list[str]:
    """Return the lines of a script that stand for the file, with comments that say where they go."""
    lines = _imports(plan)
    lines += ["", *_with_mapping("smp.init(", configuration(plan), ")")]
    if plan.has_accelerator:
        lines += [_accelerator(plan)]
    before = _model(plan) + _optimizer(plan)
    if before:
        lines += ["", *before]
    lines += _autocast(plan)
    if plan.clipping is not None and plan.sharding is not Sharding.PARAMETERS:
        lines += ["", "# Before each optimizer.step():", *_clipping(plan)]
    return lines


def _imports(plan: Plan) -> list[str]:
    names_torch = plan.optimizer is not None or (bool(_autocast(plan)) and not plan.has_accelerator)
    lines = ["import torch"] if names_torch else []
    lines += ["import shardwright as smp"]
    if _scaler(plan):
        lines += ["from accelerate.utils import GradScalerKwargs"]
    return [*lines, "from shardwright.accelerate import Accelerator"] if plan.has_accelerator else lines


def _scaler(plan: Plan) -> str:
    """Return the arguments of a scaler under autocast, of an accelerator."""
    scale = plan.loss_scale
    if scale is None or plan.is_cast or not plan.has_accelerator:
        return ""
    return f"GradScalerKwargs(init_scale={2.0**scale.power!r}, growth_interval={scale.window})"


def _accelerator(plan: Plan) -> str:
    arguments = []
    if plan.precision != "no" and not plan.is_cast:
        arguments += [f'mixed_precision="{plan.precision}"']
    if plan.accumulation is not None and plan.accumulation > 1:
        arguments += [f"gradient_accumulation_steps={plan.accumulation}"]
    if scaler := _scaler(plan):
        arguments += [f"kwargs_handlers=[{scaler}]"]
    return f"accelerator = Accelerator({', '.join(arguments)})"


def _model(plan: Plan) -> list[str]:
    lines = []
    if plan.is_delayed or plan.tensor > 1:
        managers = ["smp.tensor_parallelism()"] if plan.tensor > 1 else []
        managers += ["smp.model_creation()"] if plan.is_delayed else []
        lines += [f"# Where the model is created: with {', '.join(managers)}:"]
    if plan.checkpointed is not None:
        names = json.dumps(list(plan.checkpointed)) if plan.checkpointed else "model._no_split_modules"
        lines += [
            "# Once the model is created:",
            "for module in model.modules():",
            f"    if type(module).__name__ in {names}:",
            "        smp.set_activation_checkpointing(module)",
        ]
    return lines


def _optimizer(plan: Plan) -> list[str]:
    """Return how the optimizer is created, and how it scales the loss where the model is cast to float16."""
    lines = []
    if plan.optimizer is not None:
        given = [
            f"{key}={key if value == 'auto' else tuple(value) if isinstance(value, list) else repr(value)}"
            for key, value in plan.optimizer.arguments.items()
        ]
        lines += [f"optimizer = {plan.optimizer.name}({', '.join(['model.parameters()', *given])})"]
    scale = plan.loss_scale
    if scale is not None and plan.is_cast:
        lines += _scaling(scale)
    elif not plan.has_accelerator:
        lines += ["optimizer = smp.DistributedOptimizer(optimizer)"]
    if lines and plan.has_accelerator:
        return ["# Before accelerator.prepare():", *lines]
    return ["# Once smp.DistributedModel has the model:", *lines] if lines else []


def _scaling(scale: LossScale) -> list[str]:
    if scale.static:
        return [f"optimizer = smp.DistributedOptimizer(optimizer, static_loss_scale={scale.static!r})"]
    settings = {
        "init_scale": 2.0**scale.power,
        "scale_window": scale.window,
        "delayed_shift": scale.hysteresis,
        "consecutive_hysteresis": scale.consecutive,
        "min_scale": scale.least,
    }
    return [
        *_with_mapping("scaling = ", settings, ""),
        "optimizer = smp.DistributedOptimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args=scaling)",
    ]


def _clipping(plan: Plan) -> list[str]:
    if plan.has_accelerator:
        call = f"accelerator.clip_grad_norm_(model.parameters(), {plan.clipping})"
        return ["if accelerator.sync_gradients:", f"    {call}"]
    if plan.is_cast:
        return [f"optimizer.clip_master_grads({plan.clipping})"]
    return [f"smp.clip_grad_norm_(model.parameters(), {plan.clipping})"]


def _autocast(plan: Plan) -> list[str]:
    """Return how the step function computes in half precision, where the model is not cast."""
    if plan.precision == "no" or plan.is_cast:
        return []
    if plan.has_accelerator:
        return ["", "# In the step function, around the model and the loss: with accelerator.autocast():"]
    dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[plan.precision]
    lines = ["", f"# In the step function, around the model and the loss: with torch.autocast(device_type, {dtype}):"]
    if plan.loss_scale is not None:
        scale = f"init_scale={2.0**plan.loss_scale.power!r}, growth_interval={plan.loss_scale.window}"
        lines += [
            f"scaler = smp.amp.GradScaler({scale})",
            "# In the step function: model.backward(scaler.scale(loss)). In place of optimizer.step():",
            "# scaler.step(optimizer), scaler.update()",
        ]
    return lines


def _with_mapping(before: str, keys: dict[str, Any], after: str) -> list[str]:
    """Return an expression with a mapping, a key in each line."""
    if not keys:
        return [f"{before}{{}}{after}"]
    values = {key: json.dumps(value) if isinstance(value, str) else repr(value) for key, value in keys.items()}
    lines = ["{", *(f"    {json.dumps(key)}: {value}," for key, value in values.items()), "}"]
    if after:
        return [before, *(f"    {line}" for line in lines), after]
    return [before + lines[0], *lines[1:]]
