"""Optimizers of sharded parameters: each rank updates its shards, which take the parameters' places meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.errors import FrameError
from shardwright.job.runtime import Runtime
from shardwright.model.models import Models
from shardwright.model.updates import Updates
from shardwright.optimizer.clip import clip_grad_norm_
from shardwright.optimizer.half_precision import HalfPrecision
from shardwright.optimizer.layout import GroupLayout, numbers_of
from shardwright.optimizer.reach.divided import kept_whole, whole_value
from shardwright.optimizer.sharding.step import Called
from shardwright.sharded_data_parallel.exchange import in_place_of_shards
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of

Update = Callable[[Callable[[], Any] | None], Any]


def shards_step(runtime: Runtime, optimizer: Any, closure: Callable[[], Any] | None, update: Update) -> Any:
    """Clip gradients, and update this rank's shards and whole parameters. All ranks of the job must call this.

    Args:
        runtime: The rank.
        optimizer: The optimizer; gets the norm of its gradients before they are clipped as ``_global_grad_norm``.
        closure: Computes gradients, or None; it is called once.
        update: The wrapped optimizer's ``step``.

    Returns:
        The result of the closure.

    Raises:
        FrameError: Called in a step.
        ConfigError: The optimizer calls its closure several times.
    """
    name = f"{type(optimizer).__name__}.step"
    if runtime.step.running:
        raise FrameError(
            f"{name} was called in step {runtime.step.number}, whose gradients are not complete yet: step optimizers "
            "outside the step function, and not in hooks"
        )
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for placement in runtime[Models].placements:
        placement.reset_shards()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    max_norm: float = runtime.place.cfg.sdp_gradient_clipping
    is_half = isinstance(optimizer, HalfPrecision)
    optimizer._global_grad_norm = (
        optimizer.clip_masters(max_norm, 2.0, "step") if is_half else clip_grad_norm_(parameters, max_norm)
    )
    updates = runtime[Updates]
    updates.begins_share(optimizer)
    with in_place_of_shards(runtime, optimizer):
        update(None if closure is None else Called(loss, name))
    updates.ends_share(optimizer)
    return loss


def take_over(
    runtime: Runtime, optimizer: Optimizer, layout: Sequence[GroupLayout] | None, *, is_new: bool
) -> list[GroupLayout] | None:
    """Put sharded parameters in the places of the whole ones that they come from, with their part of the state.

    The state of an optimizer that is new here, perhaps loaded already, is whole where it is not of sharded tensors.

    Returns the layout of the groups, if there is one, with them.
    """
    registry = runtime[ShardedParameters]
    for group in optimizer.param_groups:
        if isinstance(optimizer, HalfPrecision):
            for parameter in group["params"]:
                now = registry.now(parameter)
                if now is not parameter:
                    optimizer.move_master(parameter, registry.local(now), registry.cut)
        group["params"][:] = [registry.now(one) for one in group["params"]]
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    for parameter, state in entries:
        now = registry.now(parameter)
        optimizer.state[now] = _cut(registry, now, state) if is_new or now is not parameter else state
    if layout is None:
        return None
    return [GroupLayout(tuple(registry.now(one) for one in group.parameters), group.names) for group in layout]


def with_cut_state(runtime: Runtime | None, local: dict[str, Any], layout: Sequence[GroupLayout]) -> dict[str, Any]:
    """Return a state dict, numbered as on this rank, with its shards of tensors that have a parameter's shape."""
    if runtime is None or not (registry := runtime[ShardedParameters]):
        return local
    state = dict(local["state"])
    for number, (_, parameter) in enumerate(numbers_of(layout)):
        if number in state:
            state[number] = _cut(registry, parameter, state[number])
    return {**local, "state": state}


def with_whole_state(runtime: Runtime | None, part: dict[str, Any], layout: Sequence[GroupLayout]) -> dict[str, Any]:
    """Return a state dict, numbered as in the whole model, with whole tensors, on the CPU, in place of shards.

    The ranks that shard the parameters must all call this.
    """
    if runtime is None or not (registry := runtime[ShardedParameters]):
        return part
    state = dict(part["state"])
    for number, parameter in numbers_of(layout):
        if number in state and registry.is_sharded(parameter):
            shape = shard_of(parameter).shape
            state[number] = {
                key: registry.whole(parameter, value).cpu() if _is_like(value, shape) else _on_cpu(value)
                for key, value in state[number].items()
            }
    return {**part, "state": state}


def _cut(registry: ShardedParameters, parameter: torch.Tensor, state: Mapping[str, Any]) -> Mapping[str, Any]:
    if not registry.is_sharded(parameter):
        return state
    found = {key: shard_of(value) for key, value in state.items()}  # some are made with the optimizer, of shards
    shape = shard_of(parameter).shape
    return {
        key: value
        if value is not state[key]
        else registry.cut(value)
        if _is_like(value, parameter.shape)
        else kept_whole(value, shape)
        for key, value in found.items()
    }


def _on_cpu(value: Any) -> Any:
    whole = whole_value(value)
    return value if whole is value else whole.cpu()


def _is_like(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape
