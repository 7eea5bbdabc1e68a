"""What may not be done in the code of a step: it would happen on one rank, or once per microbatch, and be lost.

The step function runs on pp_rank 0 only, for every microbatch anew, and a module on the rank that owns it. Settings of
modules, optimizers and clipping belong outside, where every rank runs the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwright.errors import FrameError, NotOwnedError
from shardwright.execution.children import CONTAINER_METHODS, notifying
from shardwright.execution.locations import module_locations
from shardwright.frames import Leaves, current_frame
from shardwright.job.runtime import find_runtime
from shardwright.model.models import Models
from shardwright.model.sentinel import is_sentinel
from shardwright.model.updates import Updates
from shardwright.optimizer import DistributedOptimizer
from shardwright.patches import original_of


def refuse_in_step(what: str, hint: str) -> None:
    """Raise :class:`FrameError` in the code of a step; a hook of a parameter, which runs at its end, is not meant."""
    frame = current_frame()
    runtime = find_runtime()
    alone = runtime is not None and runtime.step.running and runtime.place.pp_size == 1 and not runtime.step.committing
    if frame is not None or alone:
        name = "the step function" if frame is None else frame.name
        raise FrameError(
            f"{what} was called in the code of {name}, which runs once per microbatch, before the step's gradients are "
            f"complete: {hint} outside the step function, once per step"
        )


def _holds_known(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether parameters of a model of the running step are among these."""
    runtime = find_runtime()
    if runtime is None or not runtime.step.running:
        return False
    return any(is_sentinel(parameter) or id(parameter) in runtime[Leaves].known for parameter in parameters)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Return what an optimizer trains."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """``Module.__setattr__``, which copies of the module on other ranks would not see."""
    module_locations.refuse_change(module, name, value)
    if isinstance(value, nn.Module):
        module_locations.refuse_making(module, name, value)
    module_locations.is_set(module, name, value)
    original_of(set_attribute)(module, name, value)


def delete_attribute(module: nn.Module, name: str) -> None:
    """``Module.__delattr__``, refused as a change is."""
    module_locations.refuse_change(module, name, None)
    module_locations.is_set(module, name, None)
    original_of(delete_attribute)(module, name)


def add_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """``Module.add_module``, refused as a change is, and for parameters that no optimizer would train."""
    module_locations.refuse_change(module, name, child)
    if isinstance(child, nn.Module):
        module_locations.refuse_making(module, name, child)
    module_locations.is_set(module, name, child)
    original_of(add_module)(module, name, child)


def register_buffer(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
    """``Module.register_buffer``, refused as a change is."""
    module_locations.refuse_change(module, name, None)
    module_locations.is_set(module, name, None)
    original_of(register_buffer)(module, name, *args, **kwargs)


def _child_changes(module: nn.Module, name: str) -> None:
    module_locations.refuse_change(module, name, None)
    module_locations.is_set(module, name, None)


#: By class and name, the containers' methods that change children past these.
container_methods = {place: notifying(_child_changes) for place in CONTAINER_METHODS}


def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """``Module.register_parameter``, likewise."""
    if isinstance(parameter, nn.Parameter):
        module_locations.refuse_making(module, name, parameter)
    original_of(register_parameter)(module, name, parameter)


def _registering() -> Callable[..., Any]:
    """Return one of ``Module.register_*hook``, refused in a step for a module elsewhere, where the hook would not be."""

    def register(module: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module_locations.refuse_hook(module, hook)
        return original_of(register)(module, hook, *args, **kwargs)

    return register


register_forward_hook = _registering()
register_forward_pre_hook = _registering()
register_full_backward_hook = _registering()
register_full_backward_pre_hook = _registering()


def zero_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """``Module.zero_grad``, refused in the code of a step."""
    if _holds_known(module.parameters()):
        refuse_in_step(f"{type(module).__name__}.zero_grad", "zero gradients")
    original_of(zero_module)(module, *args, **kwargs)


def zero_optimizer(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    """``Optimizer.zero_grad``, refused in the code of a step."""
    if _holds_known(parameters_of(optimizer)):
        refuse_in_step(f"{type(optimizer).__name__}.zero_grad", "zero gradients")
    original_of(zero_optimizer)(optimizer, *args, **kwargs)


def optimizer_state(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """``Optimizer.state_dict``, refused where it would be one rank's part."""
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
    return original_of(optimizer_state)(optimizer, *args, **kwargs)


def before_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """An optimizer's step begins: refused in the code of a step, and noted for the other ranks."""
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


def after_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """An optimizer's step has ended on this rank."""
    runtime = find_runtime()
    if runtime is not None and runtime.place.launch.world_size > 1:
        runtime[Updates].ends(optimizer)


def total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.nn.utils.get_total_norm``, refused where it would be the norm of one rank's part."""
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    _refuse_part_of_norm(gradients)
    return original_of(total_norm)(gradients, *args, **kwargs)


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
