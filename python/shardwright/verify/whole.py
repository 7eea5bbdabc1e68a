"""A whole model in one process: a copy of a divided model, or one that the user builds."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.execution import encoder, intercept, reproducible, stateful
from shardwright.model.distributed import DistributedModel
from shardwright.model.sentinel import is_sentinel
from shardwright.transformers_models import prepare

_OUR_FILES = frozenset(str(module.__file__) for module in (encoder, intercept, reproducible, stateful))

Build = Callable[[], nn.Module | Sequence[nn.Module]]


def whole_copy(model: DistributedModel) -> nn.Module:
    """Return a copy of the model's module with all parameters and buffers in host memory, their values not yet set.

    Parameters are tied as they were when the model was divided. Attributes that modules of other ranks have set since
    then are not included.
    """
    module = model.module
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        if is_sentinel(parameter) or type(parameter) is nn.Parameter:
            memo[id(parameter)] = nn.Parameter(_empty(parameter), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        if is_sentinel(buffer) or type(buffer) is torch.Tensor:
            memo[id(buffer)] = _empty(buffer)
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        raise ConfigError(
            f"smp.verify cannot copy the model ({type(error).__name__}: {error}); give it a function that builds the "
            "whole model anew: smp.verify(..., reference=build)"
        ) from error
    for part in copied.modules():
        _uncover(part)
    _tie(copied, model)
    prepare(copied, announce=False)
    return copied


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, layout=tensor.layout)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _uncover(module: nn.Module) -> None:
    """Remove the library's replacement of a module's forward on this rank."""
    held = module.__dict__
    if _is_ours(held.get("_compiled_call_impl")):
        held["_compiled_call_impl"] = None
    forward = held.get("forward")
    while _is_ours(forward):
        forward = forward.__wrapped__  # type: ignore[union-attr]
    function = getattr(forward, "__func__", forward)
    if forward is None or function is getattr(type(module), "forward", None):
        held.pop("forward", None)
    else:
        held["forward"] = forward


def _is_ours(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename in _OUR_FILES


def _tie(copied: nn.Module, model: DistributedModel) -> None:
    ownership = model.placement.ownership
    if ownership is None:
        return
    modules = dict(copied.named_modules(remove_duplicate=False))
    for row in ownership.decision.parameters:
        first, *others = row.names
        for name in others:
            path, _, local = name.rpartition(".")
            first_path, _, first_local = first.rpartition(".")
            modules[path]._parameters[local] = modules[first_path]._parameters[first_local]


def built(build: Build, models: Sequence[DistributedModel]) -> list[nn.Module]:
    """Return the modules that the user builds, one for each model; raise if their tensors differ."""
    made = build()
    modules = [made] if isinstance(made, nn.Module) else list(made)
    if len(modules) != len(models) or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigError(
            f"reference() returned {len(modules)} objects for {len(models)} models; allowed: one torch.nn.Module for "
            "each smp.DistributedModel, in the order of their construction"
        )
    for module, model in zip(modules, models, strict=True):
        for kind in ("named_parameters", "named_buffers"):
            here, there = (
                {name: tuple(tensor.shape) for name, tensor in getattr(side, kind)()} for side in (module, model.module)
            )
            for name in (*there, *here):
                if here.get(name) != there.get(name):
                    raise ConfigError(
                        f"reference() built a different model: {name!r} has shape {here.get(name, 'none')} in it and "
                        f"{there.get(name, 'none')} in the distributed model"
                    )
        prepare(module, announce=False)
    return modules


@contextlib.contextmanager
def in_place_of(models: Sequence[DistributedModel], modules: Sequence[nn.Module], backward: Any) -> Iterator[None]:
    """Make the models run whole modules in this process within the block, however the step function reaches them.

    ``backward`` is called instead of ``model.backward``.
    """
    with contextlib.ExitStack() as stack:
        for model, module in zip(models, modules, strict=True):
            stack.callback(model._modules.__setitem__, "module", model._modules["module"])
            model._modules["module"] = module
            for name, value in (("forward", module.__call__), ("backward", backward)):
                model.__dict__[name] = value
                stack.callback(model.__dict__.pop, name, None)
        yield
