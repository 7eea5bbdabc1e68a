"""Checks that ranks holding the same parameters have built the same model and train the same parameters."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwright.errors import ConfigError, PartitionError
from shardwright.job.objects import gathered
from shardwright.job.ranks import WORLD
from shardwright.job.runtime import Runtime
from shardwright.tensor_parallel.module import named_shardings

_OPERATION = "smp.DistributedModel"


class _TensorInfo(NamedTuple):
    """Description of one tensor of a rank's model, as sent to the other ranks.

    Attributes:
        trained: Whether it is a parameter that needs a gradient; None for a buffer.
        what: Its shape and dtype, as text.
        divided: Whether a distributed module has divided it over tensor-parallel ranks.
    """

    trained: bool | None
    what: str
    divided: bool


def check_same_model(module: nn.Module, runtime: Runtime) -> None:
    """Raise an error on all ranks if their models differ, before collectives run on the tensors.

    All ranks of the job must call this function. A parameter that only some tensor-parallel ranks hold, such as one
    that a distributed module keeps on a single rank, is checked on the ranks that hold it.

    Raises:
        PartitionError: Ranks have built different models. Raised on all ranks.
        ConfigError: A parameter is trained on some of the ranks that hold it and frozen on others. Raised on all ranks.
    """
    world = runtime.place.launch.world_size
    if world == 1:
        return
    divided = named_shardings(module)
    tensors = (*module.named_parameters(), *module.named_buffers())
    own = {name: _tensor_info(tensor, name in divided) for name, tensor in tensors}
    # Compare a digest of the undivided tensors first, and send the details only if that is not enough.
    common = repr(sorted((name, *each) for name, each in own.items() if not each.divided))
    digest = hashlib.sha256(common.encode()).hexdigest()
    if len({*gathered(_OPERATION, (digest, bool(divided)), WORLD)}) == 1 and not divided:
        return
    models = gathered(_OPERATION, own, WORLD)
    for rank in range(1, world):
        # Divided tensors differ between the tensor-parallel ranks of one replica.
        same_place = runtime.place.topology.coordinates(rank)[1] == runtime.place.topology.coordinates(0)[1]
        _compare_models(models, rank, same_place)
    for kind in ("TP_GROUP", "DP_GROUP"):
        for group in runtime.place.topology.groups(kind):
            _compare_flags(kind[:2].lower(), [models[rank] for rank in group])


def _tensor_info(tensor: torch.Tensor, divided: bool) -> _TensorInfo:
    trained = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
    if is_lazy(tensor):
        return _TensorInfo(trained, "not made yet", divided)
    return _TensorInfo(trained, f"{tuple(tensor.shape)} {tensor.dtype}", divided)


def _compare_models(models: list[dict[str, _TensorInfo]], rank: int, same_place: bool) -> None:
    """Compare a rank's model with that of rank 0."""
    for name in dict.fromkeys(name for model in (models[0], models[rank]) for name in model):
        one, other = models[0].get(name), models[rank].get(name)
        known = one or other
        assert known is not None, "one of them has it"
        if (known.divided and not same_place) or (one is not None and other is not None and one.what == other.what):
            continue
        there, here = ("absent" if each is None else each.what for each in (one, other))
        raise PartitionError(
            f"rank {rank} built a different model than rank 0: {'buffer' if known.trained is None else 'parameter'} "
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
