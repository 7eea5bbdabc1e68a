"""Models in half precision: what is cast, what goes in, and what comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shardwright import _core
from shardwright.errors import ConfigError
from shardwright.job.runtime import find_runtime
from shardwright.job.wrapped import WrappedModels

HALF = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)
_KEPT = "_shardwright_keeps_float32"


def half_dtype(cfg: _core.Config) -> torch.dtype | None:
    """Return the dtype of models that the configuration asks for; None for the dtype that the script gives them."""
    return torch.float16 if cfg.fp16 else torch.bfloat16 if cfg.bf16 else None


def keep_float32(module: nn.Module) -> nn.Module:
    """Keep a module in float32 in a job with ``fp16`` or ``bf16``. Call it on every rank, before the model is wrapped.

    The parameters and buffers of the module, and of all modules in it, keep their dtypes. Floating-point arguments of
    its calls are cast to float32, and floating-point results to the model's dtype. Without ``fp16`` and ``bf16`` this
    has no effect.

    Args:
        module: A module of the future model, such as a loss or a router.

    Returns:
        The module.

    Raises:
        ConfigError: It is no module, or it belongs to a ``smp.DistributedModel`` that is cast already.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"smp.keep_float32 was given a {type(module).__name__}; allowed: an nn.Module")
    runtime = find_runtime()
    if runtime is not None and half_dtype(runtime.place.cfg) is not None:
        for model in runtime[WrappedModels].alive:
            if any(part is module for part in model.modules()):
                raise ConfigError(
                    f"smp.keep_float32 came too late for this {type(module).__name__}: it is cast already; "
                    "call it before"
                )
    module.__dict__[_KEPT] = True
    return module


def cast_model(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters and buffers of a model in place; parameters remain the same objects.

    Args:
        module: The model. Modules that :func:`keep_float32` was called on are left out.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """
    tops = [part for part in module.modules() if part.__dict__.get(_KEPT)]
    kept = {id(tensor) for top in tops for tensor in (*top.parameters(), *top.buffers())}
    buffers: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None and id(parameter) not in kept and _differs(parameter, dtype):
                gradient, parameter.grad = parameter.grad, None
                parameter.data = parameter.data.to(dtype)
                parameter.grad = None if gradient is None else gradient.to(dtype)
        for name, buffer in part._buffers.items():
            if buffer is not None and id(buffer) not in kept and _differs(buffer, dtype):
                # Modules may share a buffer.
                part._buffers[name] = buffers.setdefault(id(buffer), buffer.to(dtype))
    for top in tops:
        top.register_forward_pre_hook(_widen, with_kwargs=True, prepend=True)
        top.register_forward_hook(_Narrow(dtype))


def _differs(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    # Types of one byte are quantized values, which belong to their module.
    return tensor.is_floating_point() and tensor.dtype != dtype and tensor.element_size() > 1


def _widen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return to_float32((args, kwargs))  # type: ignore[no-any-return]


class _Narrow:
    """The hook that casts the results of a module in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, result: Any) -> Any:
        return to_half(result, self._dtype)


def to_half(values: Any, dtype: torch.dtype) -> Any:
    """Return nested values with their float32 and float64 tensors cast to a dtype."""
    return tree_map(lambda one: one.to(dtype) if isinstance(one, torch.Tensor) and one.dtype in _WIDE else one, values)


def to_float32(values: Any) -> Any:
    """Return nested values with their float16 and bfloat16 tensors cast to float32."""
    return tree_map(lambda one: one.float() if isinstance(one, torch.Tensor) and one.dtype in HALF else one, values)
