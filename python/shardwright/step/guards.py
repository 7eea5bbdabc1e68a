"""Raises errors for operations that are not allowed inside a step.

The step function runs only on pp_rank 0, once for every microbatch, and a module runs on the rank that owns it. There,
settings of modules, optimizer calls and clipping would affect one rank only, or be repeated for each microbatch. They
belong outside the step, where every rank runs the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwright.data_parallel.shards import ParameterShards
from shardwright.errors import ConfigError, FrameError, NotOwnedError
from shardwright.execution.children import CONTAINER_METHODS, notifying
from shardwright.execution.locations import module_locations
from shardwright.frames import Leaves, current_frame
from shardwright.half_precision import LossScaling
from shardwright.job.runtime import Runtime, find_runtime
from shardwright.model.models import Models
from shardwright.model.sentinel import is_sentinel
from shardwright.model.updates import Updates
from shardwright.optimizer import DistributedOptimizer
from shardwright.optimizer.clip import refuse_scaled
from shardwright.optimizer.reach import ask_unwrapped
from shardwright.patches import original_of
from shardwright.sharded_data_parallel.parameters import ShardedParameters


def refuse_in_step(what: str, hint: str) -> None:
    """Raise :class:`FrameError` inside a step, except in hooks of parameters, which run at its end."""
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
    """Return whether parameters of a model of the running step are among these tensors."""
    runtime = find_runtime()
    if runtime is None or not runtime.step.running:
        return False
    return any(is_sentinel(parameter) or id(parameter) in runtime[Leaves].known for parameter in parameters)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Return an iterator over the parameters of an optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


# `refuse_change` looks at who called these functions, so each calls it itself.
def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Replace ``Module.__setattr__``, because copies of the module on other ranks would not be changed."""
    module_locations.refuse_change(module, name, value)
    if isinstance(value, nn.Module):
        module_locations.refuse_making(module, name, value)
    module_locations.is_set(module, name, value)
    original_of(set_attribute)(module, name, value)


def delete_attribute(module: nn.Module, name: str) -> None:
    """Replace ``Module.__delattr__``, and check it like an assignment."""
    module_locations.refuse_change(module, name, None)
    module_locations.is_set(module, name, None)
    original_of(delete_attribute)(module, name)


def add_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Replace ``Module.add_module``, and check it like an assignment, also for parameters without an optimizer."""
    module_locations.refuse_change(module, name, child)
    if isinstance(child, nn.Module):
        module_locations.refuse_making(module, name, child)
    module_locations.is_set(module, name, child)
    original_of(add_module)(module, name, child)


def register_buffer(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
    """Replace ``Module.register_buffer``, and check it like an assignment."""
    module_locations.refuse_change(module, name, None)
    module_locations.is_set(module, name, None)
    original_of(register_buffer)(module, name, *args, **kwargs)


def _child_changes(module: nn.Module, name: str) -> None:
    module_locations.refuse_change(module, name, None)
    module_locations.is_set(module, name, None)


#: Methods of containers that change children without the functions above, by class and name.
container_methods = {place: notifying(_child_changes) for place in CONTAINER_METHODS}


def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Replace ``Module.register_parameter``, and check it like an assignment."""
    if isinstance(parameter, nn.Parameter):
        module_locations.refuse_making(module, name, parameter)
    original_of(register_parameter)(module, name, parameter)


def _registering() -> Callable[..., Any]:
    """Return a replacement of ``Module.register_*hook`` that raises in a step for a module of another rank."""

    def register(module: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module_locations.refuse_hook(module, hook)
        return original_of(register)(module, hook, *args, **kwargs)

    return register


register_forward_hook = _registering()
register_forward_pre_hook = _registering()
register_full_backward_hook = _registering()
register_full_backward_pre_hook = _registering()


def zero_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Replace ``Module.zero_grad``, and raise an error inside a step."""
    if _holds_known(module.parameters()):
        refuse_in_step(f"{type(module).__name__}.zero_grad", "zero gradients")
    original_of(zero_module)(module, *args, **kwargs)


def zero_optimizer(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    """Replace ``Optimizer.zero_grad``, and raise an error inside a step."""
    if _holds_known(parameters_of(optimizer)):
        refuse_in_step(f"{type(optimizer).__name__}.zero_grad", "zero gradients")
    original_of(zero_optimizer)(optimizer, *args, **kwargs)


def optimizer_state(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Optimizer.state_dict``, and raise an error if it would be only one rank's part."""
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
    """Raise an error inside a step; otherwise record that an optimizer's step begins."""
    runtime = find_runtime()
    if runtime is None:
        return
    if runtime[LossScaling].is_on and not isinstance(optimizer, DistributedOptimizer):
        _refuse_scaled(optimizer, runtime)
    if _holds_known(parameters_of(optimizer)):
        refuse_in_step(f"{type(optimizer).__name__}.step", "step optimizers")
        if len(runtime.place.dp_ranks) > 1:
            raise FrameError(
                f"{type(optimizer).__name__}.step was called in a hook of a parameter, whose gradient is not yet "
                "reduced over data-parallel ranks, which would drift apart: step optimizers outside the step function"
            )
    if runtime.place.launch.world_size > 1:
        if not isinstance(optimizer, DistributedOptimizer):
            ask_unwrapped(optimizer, runtime)
        runtime[Updates].begins(optimizer)


def _refuse_scaled(optimizer: torch.optim.Optimizer, runtime: Runtime) -> None:
    """Raise if an optimizer would apply the gradients of scaled losses as they are."""
    own = {id(parameter) for placement in runtime[Models].placements for parameter in placement.owned_parameters()}
    if any(id(parameter) in own for parameter in parameters_of(optimizer)):
        raise ConfigError(
            f"{type(optimizer).__name__}.step of an optimizer that smp.DistributedOptimizer does not wrap, in a job "
            "with fp16: it would apply gradients that are multiplied by the loss scale. Wrap it, optimizer = "
            "smp.DistributedOptimizer(optimizer)"
        )


def after_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Record that an optimizer's step has ended on this rank."""
    runtime = find_runtime()
    if runtime is not None and runtime.place.launch.world_size > 1:
        runtime[Updates].ends(optimizer)


def total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``torch.nn.utils.get_total_norm``; raise if it is the norm of one rank's part or of scaled gradients."""
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    _refuse_scaled_gradients(gradients, "torch.nn.utils.clip_grad_norm_ (or get_total_norm)")
    if (runtime := find_runtime()) is not None:
        _refuse_part_of_norm(runtime, gradients)
    return original_of(total_norm)(gradients, *args, **kwargs)


def clip_values(parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``torch.nn.utils.clip_grad_value_``, and raise an error for gradients of scaled losses."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    _refuse_scaled_gradients(
        [one.grad for one in listed if not is_sentinel(one) and one.grad is not None], "torch.nn.utils.clip_grad_value_"
    )
    return original_of(clip_values)(listed, *args, **kwargs)


def _refuse_scaled_gradients(gradients: list[torch.Tensor], operation: str) -> None:
    runtime = find_runtime()
    given = {id(gradient) for gradient in gradients}
    for placement in () if runtime is None else runtime[Models].placements:
        if any(id(one.grad) in given for one in placement.owned_parameters() if one.grad is not None):
            refuse_scaled(operation)


def _refuse_part_of_norm(runtime: Runtime, gradients: list[torch.Tensor]) -> None:
    given = {id(gradient) for gradient in gradients}
    ranks = runtime.place.topology.group("MP_GROUP", runtime.place.rank)
    shards = runtime[ParameterShards]
    for placement in runtime[Models].placements:
        if not placement.partitioned:
            continue
        whole = runtime.place.pp_size == 1 and not placement.is_sharded
        found = [one for one in placement.owned_parameters() if one.grad is not None and id(one.grad) in given]
        sharded = any(map(runtime[ShardedParameters].is_sharded, found))
        if whole and (sharded or any(shards.of(one) is not None for one in found)):
            key = "sharded_data_parallel_degree" if sharded else "shard_optimizer_state"
            raise NotOwnedError(
                "torch.nn.utils.clip_grad_norm_ (or get_total_norm) was given gradients that are on their owners only, "
                f"with {key}: rank {runtime.place.rank} would clip by the norm of its own share. Use "
                "smp.clip_grad_norm_(model.parameters(), max_norm) on every rank"
            )
        if found and not whole:
            raise NotOwnedError(
                "torch.nn.utils.clip_grad_norm_ (or get_total_norm) was given gradients of a model that is divided "
                f"over ranks {ranks}: rank {runtime.place.rank} would clip by the norm of its own part. Use "
                "smp.clip_grad_norm_(model.parameters(), max_norm) on every one of them"
            )
