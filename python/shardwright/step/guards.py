"""What may not be done in the code of a step: it would happen on one rank, or once per microbatch, and be lost.

The step function runs on pp_rank 0 only, for every microbatch anew, and a module on the rank that owns it. Settings of
modules, optimizers and clipping belong outside, where every rank runs the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad as torch_clipping
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwright.errors import FrameError, NotOwnedError
from shardwright.execution.children import noting_changes
from shardwright.execution.elsewhere import elsewhere
from shardwright.frames import Leaves, current_frame
from shardwright.job.runtime import find_runtime
from shardwright.model.models import Models
from shardwright.model.sentinel import is_sentinel
from shardwright.model.updates import Updates
from shardwright.optimizer import DistributedOptimizer
from shardwright.patches import Patches

_HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


def refuse_in_step(what: str, cure: str) -> None:
    """Raise :class:`FrameError` in the code of a step; a hook of a parameter, which runs at its end, is not meant."""
    frame = current_frame()
    runtime = find_runtime()
    alone = runtime is not None and runtime.step.running and runtime.place.pp_size == 1 and not runtime.step.committing
    if frame is not None or alone:
        name = "the step function" if frame is None else frame.name
        raise FrameError(
            f"{what} was called in the code of {name}, which runs once per microbatch, before the step's gradients are "
            f"complete: {cure} outside the step function, once per step"
        )


def _holds_known(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether parameters of a model of the running step are among these."""
    runtime = find_runtime()
    if runtime is None or not runtime.step.running:
        return False
    return any(is_sentinel(parameter) or id(parameter) in runtime[Leaves].known for parameter in parameters)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """What an optimizer trains."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _set_attribute(module: nn.Module, name: str, value: Any) -> None:
    elsewhere.refuse_change(module, name, value)
    if isinstance(value, nn.Module):
        elsewhere.refuse_making(module, name, value)
    elsewhere.is_set(module, name, value)
    _divided.original["__setattr__"](module, name, value)


def _delete_attribute(module: nn.Module, name: str) -> None:
    elsewhere.refuse_change(module, name, None)
    elsewhere.is_set(module, name, None)
    _divided.original["__delattr__"](module, name)


def _add_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    elsewhere.refuse_change(module, name, child)
    if isinstance(child, nn.Module):
        elsewhere.refuse_making(module, name, child)
    elsewhere.is_set(module, name, child)
    _divided.original["add_module"](module, name, child)


def _child_changes(module: nn.Module, name: str) -> None:
    elsewhere.refuse_change(module, name, None)
    elsewhere.is_set(module, name, None)


def _register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if isinstance(parameter, nn.Parameter):
        elsewhere.refuse_making(module, name, parameter)
    _divided.original["register_parameter"](module, name, parameter)


def _register_hook(name: str) -> Callable[..., Any]:
    def register(module: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        elsewhere.refuse_hook(module, hook)
        return _divided.original[name](module, hook, *args, **kwargs)

    return register


def _zero_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    if _holds_known(module.parameters()):
        refuse_in_step(f"{type(module).__name__}.zero_grad", "zero gradients")
    _zeroing.original["zero_grad"](module, *args, **kwargs)


def _zero_optimizer(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    if _holds_known(parameters_of(optimizer)):
        refuse_in_step(f"{type(optimizer).__name__}.zero_grad", "zero gradients")
    _optimizers.original["zero_grad"](optimizer, *args, **kwargs)


def _optimizer_state(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(optimizer, DistributedOptimizer):
        parameters = list(parameters_of(optimizer))
        absent = sum(map(is_sentinel, parameters))
        if absent:
            raise NotOwnedError(
                f"{type(optimizer).__name__}.state_dict() of an optimizer that smp.DistributedOptimizer does not wrap: "
                f"{absent} of its {len(parameters)} parameters live on other pipeline ranks, and their state would "
                "be missing without a word. Wrap it, optimizer = smp.DistributedOptimizer(optimizer); its state_dict() "
                "is the whole model's then, and its local_state_dict() this rank's part"
            )
    return _states.original["state_dict"](optimizer, *args, **kwargs)


def _before_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    runtime = find_runtime()
    if runtime is None:
        return
    if _holds_known(parameters_of(optimizer)):
        refuse_in_step(f"{type(optimizer).__name__}.step", "step optimizers")
        if len(runtime.place.dp_ranks) > 1:
            raise FrameError(
                f"{type(optimizer).__name__}.step was called in a hook of a parameter, whose gradient is not yet "
                "reduced over data-parallel ranks, which would drift apart: step optimizers outside the step function"
            )
    if runtime.place.launch.world_size > 1:
        runtime[Updates].begins(optimizer)


def _after_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    runtime = find_runtime()
    if runtime is not None and runtime.place.launch.world_size > 1:
        runtime[Updates].ends(optimizer)


def _total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    _refuse_part_of_norm(gradients)
    return _norms.original["_get_total_norm"](gradients, *args, **kwargs)


def _refuse_part_of_norm(gradients: list[torch.Tensor]) -> None:
    runtime = find_runtime()
    if runtime is None:
        return
    given, ranks = (
        {id(gradient) for gradient in gradients},
        runtime.place.topology.group("MP_GROUP", runtime.place.rank),
    )
    for placement in runtime[Models].placements:
        if not placement.partitioned or not (runtime.place.pp_size > 1 or placement.is_sharded):
            continue
        if any(id(one.grad) in given for one in placement.owned_parameters() if one.grad is not None):
            raise NotOwnedError(
                "torch.nn.utils.clip_grad_norm_ (or get_total_norm) was given gradients of a model that is divided "
                f"over ranks {ranks}: rank {runtime.place.rank} would clip by the norm of its own part. Use "
                "smp.clip_grad_norm_(model.parameters(), max_norm) on every one of them"
            )


_zeroing = Patches(((nn.Module, "zero_grad", _zero_module),))
_optimizers = Patches(((torch.optim.Optimizer, "zero_grad", _zero_optimizer),))
_states = Patches(((torch.optim.Optimizer, "state_dict", _optimizer_state),))
_divided = Patches(
    (
        (nn.Module, "__setattr__", _set_attribute),
        (nn.Module, "__delattr__", _delete_attribute),
        *noting_changes(_child_changes),
        (nn.Module, "add_module", _add_module),
        (nn.Module, "register_parameter", _register_parameter),
        *((nn.Module, name, _register_hook(name)) for name in _HOOKS),
    ),
)
_norms = Patches(
    ((torch_clipping, "_get_total_norm", _total_norm), (torch.nn.utils, "get_total_norm", _total_norm)),
)
_step_hooks: list[RemovableHandle] = []


def _needed(pipelined: bool, divided: bool) -> list[Patches]:
    return [_zeroing, _optimizers, *([_divided, _states] if pipelined else []), *([_norms] if divided else [])]


def install(*, pipelined: bool, divided: bool) -> None:
    """Put the guards in place; counted, so that several runtimes can share them.

    Args:
        pipelined: Whether modules lie on several ranks, where settings would be those of one.
        divided: Whether parameters do, by pipeline or tensor parallelism: norms would be those of one rank's part.
    """
    for patches in _needed(pipelined, divided):
        patches.install()
    _step_hooks.append(register_optimizer_step_pre_hook(_before_optimizer_step))
    _step_hooks.append(register_optimizer_step_post_hook(_after_optimizer_step))


def uninstall(*, pipelined: bool, divided: bool) -> None:
    """Take the guards away once nobody needs them."""
    for _ in range(2):
        _step_hooks.pop().remove()
    for patches in _needed(pipelined, divided):
        patches.uninstall()
