"""Whether all ranks that hold the same parameters have built the same model, and train the same parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from shardwright.errors import ConfigError, PartitionError
from shardwright.objects import allgather
from shardwright.ranks import DP_GROUP
from shardwright.tensor_parallel.module import named_shardings

if TYPE_CHECKING:
    from shardwright.runtime import Runtime


class _Said(NamedTuple):
    """What a rank tells of a tensor of its model.

    Attributes:
        trained: Whether it is a parameter that needs a gradient; None for a buffer.
        what: Its shape and dtype, in words.
        divided: Whether a distributed module has divided it over tensor-parallel ranks.
    """

    trained: bool | None
    what: str
    divided: bool


def check_alike(module: nn.Module, runtime: Runtime) -> None:
    """Refuse models that differ between ranks, before their tensors meet in collectives.

    All ranks of DP_GROUP, which TP_GROUP is a part of, call it together. Parameters that not all tensor-parallel ranks
    have, such as those of distributed modules that only one of them keeps, count where they are.

    Raises:
        PartitionError: Ranks have built different models; all ranks raise it.
        ConfigError: A parameter is trained on some ranks and frozen on others; all ranks raise it.
    """
    if len(runtime.dp_ranks) == 1:
        return
    divided = named_shardings(module)
    own = {name: tuple(_told(tensor, name in divided)) for name, tensor in _named_tensors(module)}
    gathered = allgather(own, DP_GROUP)
    of_rank = {
        rank: {name: _Said(*said) for name, said in each.items()}
        for rank, each in zip(runtime.dp_ranks, gathered, strict=True)
    }
    first = runtime.dp_ranks[0]
    for rank in runtime.dp_ranks[1:]:
        # What is divided differs between the tensor-parallel ranks of one replica.
        same_place = rank in runtime.topology.group("RDP_GROUP", first)
        _compare_models(first, of_rank[first], rank, of_rank[rank], same_place)
    flags = {
        rank: {name: said.trained for name, said in each.items() if said.trained is not None}
        for rank, each in of_rank.items()
    }
    for kind, ranks in (("tp", runtime.tp_ranks), ("dp", runtime.dp_ranks)):
        _compare_flags(kind, [flags[rank] for rank in ranks])


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, nn.Parameter | object]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _told(tensor: object, divided: bool) -> _Said:
    trained = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return _Said(trained, "not made yet", divided)
    shape, dtype = getattr(tensor, "shape", ()), getattr(tensor, "dtype", None)
    return _Said(trained, f"{tuple(shape)} {dtype}", divided)


def _compare_models(first: int, there: dict[str, _Said], rank: int, here: dict[str, _Said], same_place: bool) -> None:
    for name in dict.fromkeys((*there, *here)):
        one, other = there.get(name), here.get(name)
        if not same_place and any(said is not None and said.divided for said in (one, other)):
            continue
        if one is None or other is None or one.what != other.what:
            kind = "buffer" if (one or other or _Said(None, "", False)).trained is None else "parameter"
            raise PartitionError(
                f"rank {rank} built another model than rank {first}: {kind} {name!r} is "
                f"{'absent' if one is None else one.what} on rank {first} and "
                f"{'absent' if other is None else other.what} on rank {rank}; every rank must run the same script with "
                "the same model configuration"
            )


def _compare_flags(kind: str, flags: list[dict[str, bool]]) -> None:
    for name in dict.fromkeys(name for each in flags for name in each):
        trained = [rank for rank, each in enumerate(flags) if each.get(name) is True]
        frozen = [rank for rank, each in enumerate(flags) if each.get(name) is False]
        if trained and frozen:
            raise ConfigError(
                f"smp.DistributedModel: all {kind} ranks have to train the same parameters, but {name!r} is frozen "
                f"(requires_grad=False) on {kind} ranks {frozen} and trained on {kind} ranks {trained}"
            )
