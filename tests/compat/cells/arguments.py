"""The cells of arguments: each argument of each call at each value, in each layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.compat.cells.cell import LAYOUTS, REFUSED, SAID, WORKS, Cell

_DYNAMIC = {"scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
_SCALES: tuple[Mapping[str, Any], ...] = (
    {},
    {"static_loss_scale": None},
    {"static_loss_scale": 128.0},
    {"dynamic_loss_scale": True},
    {"static_loss_scale": None, "dynamic_loss_scale": True, "dynamic_loss_args": _DYNAMIC},
    {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 1024.0}},
    {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 1024.0, "consecutive_hysteresis": True}},
    {"dynamic_loss_scale": False, "dynamic_loss_args": _DYNAMIC},
    {"static_loss_scale": 128.0, "dynamic_loss_scale": True},
    {"dynamic_loss_scale": True, "dynamic_loss_args": {"initial_scale": 3}},
    {"static_loss_scale": -1.0},
)
_MODEL: Mapping[str, tuple[Any, ...]] = {
    "trace_device": ("gpu", "cpu", "tpu"),
    "trace_execution_times": (False, True),
    "overlapping_allreduce": (True, False),
    "backward_passes_per_step": (1, 2, 0),
    "average_grads_across_microbatches": (True, False),
    "bucket_cap_mb": (25, 1),
    "trace_memory_usage": (False, True),
    "broadcast_buffers": (True, False),
    "find_unused_parameters": (False, True),
    "gradient_as_bucket_view": (False, True),
}
_BAD_MODEL = {"trace_device": "tpu", "backward_passes_per_step": 0}
_STEP: tuple[Mapping[str, Any], ...] = (
    {},
    {"detach_outputs": True},
    {"detach_outputs": False},
    {"non_split_inputs": ["scale"]},
    {"input_split_axes": {"inputs": 0}},
)
_CREATION: tuple[Mapping[str, Any], ...] = (
    {"tensor_parallelism": False},
    {"tensor_parallelism": True},
    {"tensor_parallelism": True, "dtype": "float32"},
    {"tensor_parallelism": False, "dtype": "float32"},
    {"tensor_parallelism": False, "dtype": "int64"},
    *(
        {"tensor_parallelism": True, name: value}
        for name in (
            "attention_in_fp32",
            "query_key_layer_scaling",
            "fused_softmax",
            "fused_dropout",
            "fused_bias_gelu",
            "flash_attention",
            "fp32_residual_addition",
            "use_alibi",
            "distribute_embedding",
            "zero_init",
        )
        for value in (False, True)
    ),
)
_CHECKPOINTING: tuple[Mapping[str, Any], ...] = (
    {},
    {"preserve_rng_state": False},
    {"pack_args_as_tuple": True},
    {"strategy": "each"},
    {"strategy": "contiguous"},
    {"strategy": "group_2"},
    {"strategy": "all"},
)
_SAVING: tuple[Mapping[str, Any], ...] = (
    {"partial": True},
    {"partial": True, "num_kept_partial_checkpoints": 1},
    {"partial": True, "with_optimizer": False},
    {"partial": False, "with_optimizer": False},
    {"partial": False, "translate_if_full": False, "with_optimizer": False},
)


def cells() -> Iterator[Cell]:
    """Yield all of them."""
    for layout in LAYOUTS:
        for name, values in _MODEL.items():
            for value in values:
                bad = _BAD_MODEL.get(name) == value
                yield _cell("DistributedModel", {name: value}, layout, *((REFUSED, name) if bad else (WORKS, "")))
        for scale in _SCALES:
            yield _cell("DistributedOptimizer", scale, layout, *_of_scale(scale, layout))
        for step in _STEP:
            yield _cell("step", step, layout, WORKS, "")
        for creation in _CREATION:
            bad = creation.get("dtype") == "int64"
            yield _cell("model_creation", creation, layout, *((REFUSED, "dtype") if bad else (WORKS, "")))
        for checkpointing in _CHECKPOINTING:
            bad = checkpointing.get("strategy") == "all"
            call = "set_activation_checkpointing"
            yield _cell(call, checkpointing, layout, *((REFUSED, "strategy") if bad else (WORKS, "")))
        for saving in _SAVING:
            yield _cell("save_checkpoint", saving, layout, WORKS, "")


def _of_scale(scale: Mapping[str, Any], layout: str) -> tuple[str, str]:
    """Losses are scaled with ``fp16`` only."""
    changed = scale.get("static_loss_scale", 1.0) not in (None, 1.0)
    if scale.get("static_loss_scale") == -1.0:
        return REFUSED, "static_loss_scale"
    if "initial_scale" in (scale.get("dynamic_loss_args") or {}):
        return REFUSED, "initial_scale"
    if not LAYOUTS[layout].config.get("fp16"):
        idle = changed or scale.get("dynamic_loss_scale") or scale.get("dynamic_loss_args")
        return (SAID, "losses are scaled in a job with fp16 only") if idle else (WORKS, "")
    if changed and scale.get("dynamic_loss_scale"):
        return REFUSED, "give one of them"
    if scale.get("dynamic_loss_args") and not scale.get("dynamic_loss_scale"):
        return SAID, "dynamic_loss_scale is False"
    return WORKS, ""


def _cell(call: str, given: Mapping[str, Any], layout: str, outcome: str, words: str) -> Cell:
    name = f"smp.{call}({', '.join(given)})"
    shown = ", ".join(repr(value) for value in given.values())
    return Cell(name, shown, layout, LAYOUTS[layout].config, outcome, words, {call: given})
