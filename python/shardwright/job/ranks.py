"""Ranks, sizes and groups of the job (spec, 2.2).

Before ``smp.init``, all functions raise :class:`ShardwrightError`.
"""

from __future__ import annotations

import operator
from enum import Enum
from typing import Any

from shardwright.errors import ConfigError
from shardwright.job.runtime import current_runtime
from shardwright.safe_repr import safe_repr


class CommGroup(Enum):
    """A communication group (spec, 2.2). Each member stands for the group of that kind that contains the calling rank.

    Attributes:
        WORLD: All ranks of the job.
        MP_GROUP: The ranks of one model replica.
        DP_GROUP: The ranks that run the same pipeline stage.
        PP_GROUP: The ranks of one pipeline, one for each stage.
        TP_GROUP: The ranks that divide the same modules, a subset of DP_GROUP.
        RDP_GROUP: The ranks that hold the same parameters, a subset of DP_GROUP.
    """

    WORLD = "WORLD"
    MP_GROUP = "MP_GROUP"
    DP_GROUP = "DP_GROUP"
    PP_GROUP = "PP_GROUP"
    TP_GROUP = "TP_GROUP"
    RDP_GROUP = "RDP_GROUP"


class RankType(Enum):
    """How an integer rank is interpreted (spec, 2.2).

    Attributes:
        WORLD_RANK: The global rank.
        MP_RANK: The index in the calling rank's MP_GROUP.
        DP_RANK: The index in its DP_GROUP.
        PP_RANK: The index in its PP_GROUP.
        TP_RANK: The index in its TP_GROUP.
        RDP_RANK: The index in its RDP_GROUP.
    """

    WORLD_RANK = "WORLD"
    MP_RANK = "MP_GROUP"
    DP_RANK = "DP_GROUP"
    PP_RANK = "PP_GROUP"
    TP_RANK = "TP_GROUP"
    RDP_RANK = "RDP_GROUP"


WORLD, MP_GROUP, DP_GROUP, PP_GROUP, TP_GROUP, RDP_GROUP = CommGroup


def group_ranks(group: CommGroup) -> list[int]:
    """Return the global ranks of one of the calling rank's groups, in ascending order.

    Raises:
        ConfigError: ``group`` is not a :class:`CommGroup`.
    """
    runtime = current_runtime()
    if not isinstance(group, CommGroup):
        raise ConfigError(
            f"group is {safe_repr(group)}; allowed: {', '.join(f'smp.{each.name}' for each in CommGroup)}"
        )
    return list(runtime.place.topology.group(group.value, runtime.place.rank))


def data_group() -> CommGroup:
    """Return which of the calling rank's groups has the ranks that get different samples."""
    return RDP_GROUP if current_runtime().place.cfg.prescaled_batch else DP_GROUP


def global_rank(rank: int, rank_type: RankType, argument: str = "rank") -> int:
    """Return the global rank for a rank of some type. Error messages name it as ``argument``.

    Raises:
        ConfigError: ``rank`` is not an integer or not in the group, or ``rank_type`` is not a :class:`RankType`.
    """
    if not isinstance(rank_type, RankType):
        allowed = ", ".join(f"smp.RankType.{each.name}" for each in RankType)
        raise ConfigError(f"rank_type is {safe_repr(rank_type)}; allowed: {allowed}")
    if type(rank) is not int:
        rank = _as_integer(rank, argument)
    if rank_type is RankType.WORLD_RANK and 0 <= rank < current_runtime().place.launch.world_size:
        return rank
    ranks = group_ranks(CommGroup(rank_type.value))
    if not 0 <= rank < len(ranks):
        raise ConfigError(f"{rank_type.name} {rank} does not exist; allowed: 0 to {len(ranks) - 1}")
    return ranks[rank]


def _as_integer(rank: Any, argument: str) -> int:
    """Convert a rank of another integer type, such as NumPy's."""
    try:
        if isinstance(rank, bool):
            raise TypeError
        return operator.index(rank)
    except TypeError:
        raise ConfigError(f"{argument} is {safe_repr(rank)}, a {type(rank).__name__}; allowed: an integer") from None


def _index(group: CommGroup) -> int:
    return group_ranks(group).index(current_runtime().place.rank)


def rank() -> int:
    """Return the global rank of the calling process, from 0 to ``size() - 1`` (spec, 2.2)."""
    return current_runtime().place.rank


def size() -> int:
    """Return the number of ranks in the job (spec, 2.2)."""
    return len(group_ranks(WORLD))


def local_rank() -> int:
    """Return the rank among the processes of the job on this host, from 0 to ``local_size() - 1`` (spec, 2.2)."""
    return current_runtime().place.launch.local_rank


def local_size() -> int:
    """Return the number of processes of the job on this host (spec, 2.2)."""
    return current_runtime().place.launch.local_size


def mp_rank() -> int:
    """Return the index of this rank in MP_GROUP, the ranks of one model replica (spec, 2.2)."""
    return _index(MP_GROUP)


def mp_size() -> int:
    """Return the size of MP_GROUP: the size of one model replica (spec, 2.2)."""
    return len(group_ranks(MP_GROUP))


def dp_rank() -> int:
    """Return the index of this rank in DP_GROUP, the ranks of one pipeline stage (spec, 2.2)."""
    return _index(DP_GROUP)


def dp_size() -> int:
    """Return the size of DP_GROUP: the data-parallel degree, tensor-parallel ranks included (spec, 2.2)."""
    return len(group_ranks(DP_GROUP))


def pp_rank() -> int:
    """Return the index of this rank in PP_GROUP: the pipeline stage (spec, 2.2)."""
    return _index(PP_GROUP)


def pp_size() -> int:
    """Return the size of PP_GROUP: the pipeline-parallel degree (spec, 2.2)."""
    return len(group_ranks(PP_GROUP))


def tp_rank() -> int:
    """Return the index of this rank in TP_GROUP, the ranks that divide the same modules (spec, 2.2)."""
    return _index(TP_GROUP)


def tp_size() -> int:
    """Return the size of TP_GROUP: the tensor-parallel degree (spec, 2.2)."""
    return len(group_ranks(TP_GROUP))


def rdp_rank() -> int:
    """Return the index of this rank in RDP_GROUP, the ranks that hold the same parameters (spec, 2.2)."""
    return _index(RDP_GROUP)


def rdp_size() -> int:
    """Return the size of RDP_GROUP: the reduced data-parallel degree (spec, 2.2)."""
    return len(group_ranks(RDP_GROUP))


def get_mp_group() -> list[int]:
    """Return the global ranks of MP_GROUP, in ascending order (spec, 2.2)."""
    return group_ranks(MP_GROUP)


def get_dp_group() -> list[int]:
    """Return the global ranks of DP_GROUP, in ascending order (spec, 2.2)."""
    return group_ranks(DP_GROUP)


def get_pp_group() -> list[int]:
    """Return the global ranks of PP_GROUP, in ascending order (spec, 2.2)."""
    return group_ranks(PP_GROUP)


def get_tp_group() -> list[int]:
    """Return the global ranks of TP_GROUP, in ascending order (spec, 2.2)."""
    return group_ranks(TP_GROUP)


def get_rdp_group() -> list[int]:
    """Return the global ranks of RDP_GROUP, in ascending order (spec, 2.2)."""
    return group_ranks(RDP_GROUP)
