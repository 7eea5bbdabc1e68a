"""Whether all ranks that hold the same parameters have built the same model, and train the same parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwright.errors import ConfigError, PartitionError
from shardwright.job.objects import gathered
from shardwright.job.ranks import WORLD
from shardwright.tensor_parallel.module import named_shardings

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

_OPERATION = "smp.DistributedModel"


class _TensorInfo(NamedTuple):
    """What a rank tells of a tensor of its model.

    Attributes:
        trained: Whether it is a parameter that needs a gradient; None for a buffer.
        what: Its shape and dtype, in words.
        divided: Whether a distributed module has divided it over tensor-parallel ranks.
    """

    trained: bool | None
    what: str
    divided: bool


def check_same_model(module: nn.Module, runtime: Runtime) -> None:
    """Refuse models that differ between ranks, before their tensors meet in collectives; all ranks of the job call it.

    Parameters that not all tensor-parallel ranks have, such as those of distributed modules that only one of them
    keeps, count where they are.

    Raises:
        PartitionError: Ranks have built different models; all ranks raise it.
        ConfigError: A parameter is trained on some ranks and frozen on others that hold it too; all ranks raise it.
    """
    world = runtime.place.launch.world_size
    if world == 1:
        return
    divided = named_shardings(module)
    own = {name: _tensor_info(tensor, name in divided) for name, tensor in _named_tensors(module)}
    # What all ranks have in common is compared by a few bytes; details are sent only where that differs.
    common = repr(sorted((name, *each) for name, each in own.items() if not each.divided))
    digest = hashlib.sha256(common.encode()).hexdigest()
    if len({*gathered(_OPERATION, (digest, bool(divided)), WORLD)}) == 1 and not divided:
        return
    every = gathered(_OPERATION, {name: tuple(each) for name, each in own.items()}, WORLD)
    models = [{name: _TensorInfo(*each) for name, each in of_rank.items()} for of_rank in every]
    for rank in range(1, world):
        # What is divided differs between the tensor-parallel ranks of one replica.
        same_place = runtime.place.topology.coordinates(rank)[1] == runtime.place.topology.coordinates(0)[1]
        _compare_models(models, rank, same_place)
    for kind in ("TP_GROUP", "DP_GROUP"):
        for group in runtime.place.topology.groups(kind):
            _compare_flags(kind[:2].lower(), [models[rank] for rank in group])


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _tensor_info(tensor: torch.Tensor, divided: bool) -> _TensorInfo:
    trained = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
    if is_lazy(tensor):
        return _TensorInfo(trained, "not made yet", divided)
    return _TensorInfo(trained, f"{tuple(tensor.shape)} {tensor.dtype}", divided)


def _compare_models(models: list[dict[str, _TensorInfo]], rank: int, same_place: bool) -> None:
    """Hold a rank's model against that of rank 0."""
    for name in dict.fromkeys(name for model in (models[0], models[rank]) for name in model):
        one, other = models[0].get(name), models[rank].get(name)
        known = one or other
        assert known is not None, "one of them has it"
        if (known.divided and not same_place) or (one is not None and other is not None and one.what == other.what):
            continue
        there, here = ("absent" if each is None else each.what for each in (one, other))
        raise PartitionError(
            f"rank {rank} built another model than rank 0: {'buffer' if known.trained is None else 'parameter'} "
            f"{name!r} is {there} on rank 0 and {here} on rank {rank}; every rank must run the same script with the "
            "same model configuration"
        )


def _compare_flags(kind: str, models: list[dict[str, _TensorInfo]]) -> None:
    for name in dict.fromkeys(name for each in models for name in each):
        flags = [each[name].trained if name in each else None for each in models]
        trained = [rank for rank, flag in enumerate(flags) if flag is True]
        frozen = [rank for rank, flag in enumerate(flags) if flag is False]
        if trained and frozen:
            raise ConfigError(
                f"smp.DistributedModel: all {kind} ranks have to train the same parameters, but {name!r} is frozen "
                f"(requires_grad=False) on {kind} ranks {frozen} and trained on {kind} ranks {trained}"
            )
