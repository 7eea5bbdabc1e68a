"""Gradient clipping by the norm over all ranks of a model replica."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

from shardwright.data_parallel.shards import ParameterShards, Slice
from shardwright.errors import ConfigError
from shardwright.half_precision import LossScaling
from shardwright.job.ranks import MP_GROUP, WORLD, CommGroup
from shardwright.job.runtime import current_runtime, find_runtime
from shardwright.model.gather import gather_over
from shardwright.model.models import Models
from shardwright.model.sentinel import is_sentinel
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of

Counted = TypeVar("Counted", bound=torch.Tensor)


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip gradients by their norm over the whole model.

    All ranks of MP_GROUP, with ``shard_optimizer_state`` or ``sharded_data_parallel_degree`` all ranks of the job,
    must call this, outside the step function. The counterpart of
    ``torch.nn.utils.clip_grad_norm_``: the norm is taken over the gradients of all pipeline- and tensor-parallel ranks,
    and each parameter counts once. All ranks scale their gradients by the same factor.

    Args:
        parameters: The model, its parameters, or some of them. Parameters of other ranks may be among them; they are
            counted where they live.
        max_norm: The maximum norm.
        norm_type: The order of the norm; can be ``inf``. With distributed modules it must be positive.
        error_if_nonfinite: Raise an error if the norm is NaN or infinite.
        foreach: Use the foreach implementation; with None, torch chooses.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: On every rank, if the norm is not finite and ``error_if_nonfinite`` is set.
        ConfigError: On every rank, if ``norm_type`` is not positive and modules are divided over tensor-parallel ranks,
            or elements of parameters over data-parallel ones; or losses are scaled (``fp16``), so that the norm would
            be that of scaled gradients.
    """
    refuse_scaled("smp.clip_grad_norm_")
    local = _local_parameters(parameters)
    runtime = find_runtime()
    shards = runtime is not None and (runtime.place.shards_optimizer_state or runtime.place.shards_parameters)
    counted = counted_here(local, norm_type, "smp.clip_grad_norm_")
    return clip_gradients(
        _gradients(local),
        _own_gradients(counted, norm_type) if shards else _gradients(counted),
        max_norm,
        norm_type,
        "clip_grad_norm_",
        error_if_nonfinite,
        foreach,
        group=WORLD if shards else MP_GROUP,
    )


def clip_gradients(
    gradients: list[torch.Tensor],
    counted: list[torch.Tensor],
    max_norm: float,
    norm_type: float,
    operation: str,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: CommGroup = MP_GROUP,
) -> torch.Tensor:
    """Clip gradients by their norm over all ranks of a group, which must all call this; return the norm.

    Args:
        gradients: This rank's gradients.
        counted: Those of them, or parts of them, that no other rank of the group counts.
        max_norm: See :func:`clip_grad_norm_`.
        norm_type: See :func:`clip_grad_norm_`.
        operation: The name of the calling function, for error messages.
        error_if_nonfinite: See :func:`clip_grad_norm_`.
        foreach: See :func:`clip_grad_norm_`.
        group: The group.
    """
    norms = gradient_norms(counted, norm_type, foreach)
    collected: list[torch.Tensor] = gather_over(group, norms.cpu(), operation)
    device = gradients[0].device if gradients else torch.device("cpu")
    whole = [part for part in collected if part.numel()]
    if not whole:
        return torch.tensor(0.0)
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(whole), norm_type).to(device)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for alike in _by_kind(gradients).values():
        if alike[0].layout is not torch.strided or foreach is False:
            for gradient in alike:
                gradient.mul_(scale.to(gradient.device))
        else:
            torch._foreach_mul_(alike, scale.to(alike[0].device))
    return total


def gradient_norms(gradients: list[torch.Tensor], norm_type: float = 2.0, foreach: bool | None = None) -> torch.Tensor:
    """Return the norm of each gradient as one tensor."""
    if not gradients:
        return torch.empty(0)
    values = [_values(gradient) for gradient in gradients]
    norms: dict[int, torch.Tensor] = {}
    for group in _by_kind(values).values():
        found = (
            [torch.linalg.vector_norm(value, norm_type) for value in group]
            if foreach is False
            else torch._foreach_norm(group, norm_type)
        )
        norms.update(zip(map(id, group), found, strict=True))
    return torch.stack([norms[id(value)].to(gradients[0].device) for value in values])


def refuse_scaled(operation: str) -> None:
    """Raise if gradients are those of scaled losses, whose norm says nothing."""
    runtime = find_runtime()
    scaling = None if runtime is None else runtime[LossScaling]
    if scaling is not None and scaling.scaler is not None and scaling.is_on:
        raise ConfigError(
            f"{operation} in a job with fp16: gradients are multiplied by the loss scale, "
            f"{scaling.scaler.loss_scale:g}; use optimizer.clip_master_grads(max_norm), which clips what is applied"
        )


def _local_parameters(parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    is_generator = isinstance(parameters, types.GeneratorType)
    found = list(parameters)
    if is_generator and not found:
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3)
    distinct = {id(parameter): parameter for parameter in found if not is_sentinel(parameter)}
    return list(distinct.values())


def counted_here(parameters: list[Counted], norm_type: float, operation: str) -> list[Counted]:
    """Select the parameters that no other tensor-parallel rank counts.

    Raises:
        ConfigError: ``norm_type`` is not positive and modules are divided over tensor-parallel ranks.
    """
    runtime = find_runtime()
    if runtime is None or len(runtime.place.tp_ranks) == 1:
        return parameters
    sharded = [placement.sharded for placement in runtime[Models].placements if placement.is_sharded]
    if sharded and not norm_type > 0:
        raise ConfigError(
            f"{operation}: norm_type is {norm_type}; with tensor_parallel_degree {len(runtime.place.tp_ranks)} "
            "it has to be positive: other norms of a whole do not follow from those of its parts"
        )
    if runtime.place.rank == runtime.place.tp_ranks[0]:
        return parameters
    by_id = {key: sharding for one in sharded for key, sharding in one.by_id().items()}
    divided = {key for key, sharding in by_id.items() if sharding.is_divided}
    over_rdp = {key for key, sharding in by_id.items() if sharding.over_rdp}
    shards = runtime[ParameterShards]

    def is_owned_once(parameter: torch.Tensor) -> bool:
        return id(parameter) not in over_rdp and shards.assigned(parameter) is not None

    return [one for one in parameters if id(one) in divided or is_owned_once(one)]


def counted_over_replicas(
    parameters: list[Counted], norm_type: float, operation: str
) -> list[tuple[Counted, Slice | None]]:
    """Select the parameters, or parts of them, that no other data-parallel rank counts, where these share the updates.

    Args:
        parameters: The parameters.
        norm_type: The order of the norm.
        operation: The name of the calling function, for error messages.

    Returns:
        Parameters, each with the part that counts; None for all that this rank holds of it.

    Raises:
        ConfigError: ``norm_type`` is not positive and ranks have parts of a parameter.
    """
    runtime = current_runtime()
    shards, registry, place = runtime[ParameterShards], runtime[ShardedParameters], runtime.place
    found: list[tuple[Counted, Slice | None]] = []
    for parameter in parameters:
        slices, is_sharded = shards.assigned(parameter), registry.is_sharded(parameter)
        if (is_sharded or (slices is not None and len(slices) > 1)) and not norm_type > 0:
            key = "sharded_data_parallel_degree" if is_sharded else "shard_optimizer_state"
            raise ConfigError(
                f"{operation}: norm_type is {norm_type}; with {key} it has to be positive: other norms of a whole do "
                "not follow from those of its parts"
            )
        if is_sharded:
            if place.dp_ranks[0] in place.shard_ranks and shard_of(parameter).numel():
                found.append((parameter, None))
            continue
        own = shards.own(parameter, place.rank)
        if own is not None and own.stop - own.start < parameter.numel():
            found.append((parameter, own))
        elif own is not None or (slices is None and place.rank == place.rdp_ranks[0]):
            found.append((parameter, None))
    return found


def _own_gradients(parameters: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    counted = counted_over_replicas(parameters, norm_type, "smp.clip_grad_norm_")
    return [shard_of(one.grad) if part is None else part.of(one.grad) for one, part in counted if one.grad is not None]


def _gradients(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [shard_of(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    # Entries of an uncoalesced gradient for the same index add up before the norm is taken.
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient


def _by_kind(
    tensors: list[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype, torch.layout], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype, torch.layout], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype, tensor.layout), []).append(tensor)
    return groups
