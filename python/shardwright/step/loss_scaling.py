"""``torch.amp.GradScaler`` for a divided model: all ranks of a replica skip an optimizer's step, or none does.

The step function scales the loss, on pp_rank 0. Every rank then unscales the gradients that it holds. Without these
replacements, each rank would decide from its own gradients whether any overflowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from shardwright.job.ranks import MP_GROUP, WORLD
from shardwright.job.runtime import current_runtime, find_runtime
from shardwright.model.gather import gather_over
from shardwright.model.models import Models
from shardwright.model.sentinel import is_sentinel
from shardwright.optimizer import DistributedOptimizer
from shardwright.patches import original_of
from shardwright.sharded_data_parallel.exchange import in_place_of_shards
from shardwright.step.guards import parameters_of, refuse_in_step


def _spans_ranks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer trains what is divided over ranks. The result is the same on every one of them."""
    runtime = find_runtime()
    if runtime is None:
        return False
    place = runtime.place
    shards = place.shards_optimizer_state or place.shards_parameters
    if place.pp_size == 1 and len(place.tp_ranks) == 1 and not shards:
        return False
    if isinstance(optimizer, DistributedOptimizer):
        return any(optimizer.trains(model) for model in runtime[Models].alive)
    given = {id(parameter) for parameter in parameters_of(optimizer)}
    return any(map(is_sentinel, parameters_of(optimizer))) or any(
        id(parameter) in given
        for placement in runtime[Models].placements
        if placement.partitioned
        for parameter in placement.owned_parameters()
    )


def unscale_grads_(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *rest: Any
) -> dict[torch.device, torch.Tensor]:
    """Replace ``GradScaler._unscale_grads_``, so that all ranks that share an update find infinities, or none does."""
    spans = _spans_ranks(optimizer)
    if spans:
        refuse_in_step(f"{type(scaler).__name__}.unscale_ (or step)", "unscale gradients")
    with in_place_of_shards(find_runtime(), optimizer):
        found: dict[torch.device, torch.Tensor] = original_of(unscale_grads_)(
            scaler, optimizer, inv_scale, found_inf, *rest
        )
    if not spans:
        return found
    here = any(bool(value) for value in found.values())
    place = current_runtime().place
    group = WORLD if place.shards_optimizer_state or place.shards_parameters else MP_GROUP
    anywhere = float(any(gather_over(group, here, "GradScaler.unscale_")))
    for value in found.values():
        value.fill_(anywhere)
    # A rank may hold no parameters of the optimizer, or no gradients for them.
    return found or {found_inf.device: found_inf.fill_(anywhere)}


def check_scale_growth_tracker(scaler: GradScaler, function: str) -> Any:
    """Replace ``GradScaler._check_scale_growth_tracker``, for ranks that have not scaled a loss."""
    runtime = find_runtime()
    if runtime is not None and not runtime.place.is_root and scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(runtime.place.device)  # the first loss was scaled on pp_rank 0
    return original_of(check_scale_growth_tracker)(scaler, function)


def update(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
    """Replace ``GradScaler.update``, and raise an error inside a step."""
    refuse_in_step(f"{type(scaler).__name__}.update", "update the scale")
    original_of(update)(scaler, *args, **kwargs)
