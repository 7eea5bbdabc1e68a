"""Whether all ranks that hold the same parameters train the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from shardwright.errors import ConfigError
from shardwright.objects import allgather
from shardwright.ranks import DP_GROUP

if TYPE_CHECKING:
    from shardwright.runtime import Runtime


def check_frozen_alike(module: nn.Module, runtime: Runtime) -> None:
    """Refuse a model with parameters that are trained on some ranks and frozen on others.

    All ranks of DP_GROUP, which TP_GROUP is a part of, call it together. Parameters that not all ranks have, such as
    those of distributed modules that only one tp rank keeps, count where they are.

    Raises:
        ConfigError: There are such parameters; all ranks raise it.
    """
    if len(runtime.dp_ranks) == 1:
        return
    flags = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    of_rank = dict(zip(runtime.dp_ranks, allgather(flags, DP_GROUP), strict=True))
    for kind, ranks in (("tp", runtime.tp_ranks), ("dp", runtime.dp_ranks)):
        _compare(kind, [of_rank[rank] for rank in ranks])


def _compare(kind: str, flags: list[dict[str, bool]]) -> None:
    for name in dict.fromkeys(name for each in flags for name in each):
        trained = [rank for rank, each in enumerate(flags) if each.get(name) is True]
        frozen = [rank for rank, each in enumerate(flags) if each.get(name) is False]
        if trained and frozen:
            raise ConfigError(
                f"smp.DistributedModel: all {kind} ranks have to train the same parameters, but {name!r} is frozen "
                f"(requires_grad=False) on {kind} ranks {frozen} and trained on {kind} ranks {trained}"
            )
