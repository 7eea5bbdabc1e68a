"""Ranks, sizes and groups of the job (the spec's 2.2)."""

from __future__ import annotations

import operator
from enum import Enum
from typing import Any

from shardwright.errors import ConfigError
from shardwright.job.runtime import current_runtime
from shardwright.safe_repr import safe_repr


class CommGroup(Enum):
    """A set of ranks to communicate with, always the one that the calling rank belongs to."""

    WORLD = "WORLD"
    MP_GROUP = "MP_GROUP"
    DP_GROUP = "DP_GROUP"
    PP_GROUP = "PP_GROUP"
    TP_GROUP = "TP_GROUP"
    RDP_GROUP = "RDP_GROUP"


class RankType(Enum):
    """How an integer rank is meant: globally, or as a place in one of the calling rank's groups."""

    WORLD_RANK = "WORLD"
    MP_RANK = "MP_GROUP"
    DP_RANK = "DP_GROUP"
    PP_RANK = "PP_GROUP"
    TP_RANK = "TP_GROUP"
    RDP_RANK = "RDP_GROUP"


WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP


def group_ranks(group: CommGroup) -> list[int]:
    """The global ranks of the calling rank's group, ascending.

    Raises:
        ConfigError: It is no group.
    """
    runtime = current_runtime()
    if not isinstance(group, CommGroup):
        raise ConfigError(
            f"group is {safe_repr(group)}; allowed: {', '.join(f'smp.{each.name}' for each in CommGroup)}"
        )
    return list(runtime.place.topology.group(group.value, runtime.place.rank))


def global_rank(rank: int, rank_type: RankType, argument: str = "rank") -> int:
    """The global rank that ``rank`` means, which errors call ``argument``.

    Raises:
        ConfigError: There is no such rank in the group, or no such type of ranks.
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
        raise ConfigError(f"{rank_type.name} {rank} does not exist; allowed are 0 to {len(ranks) - 1}")
    return ranks[rank]


def _as_integer(rank: Any, argument: str) -> int:
    """A rank of another type of whole numbers, such as NumPy's."""
    try:
        if isinstance(rank, bool):
            raise TypeError
        return operator.index(rank)
    except TypeError:
        raise ConfigError(f"{argument} is {safe_repr(rank)}, a {type(rank).__name__}; allowed: an integer") from None


def _place(group: CommGroup) -> int:
    return group_ranks(group).index(current_runtime().place.rank)


def rank() -> int:
    """The global rank."""
    return current_runtime().place.rank


def size() -> int:
    """The number of ranks of the job."""
    return len(group_ranks(WORLD))


def local_rank() -> int:
    """The rank among the job's processes on this host."""
    return current_runtime().place.launch.local_rank


def local_size() -> int:
    """The number of the job's processes on this host."""
    return current_runtime().place.launch.local_size


def mp_rank() -> int:
    """The place in MP_GROUP: one model replica."""
    return _place(MP_GROUP)


def mp_size() -> int:
    """The number of ranks of one model replica."""
    return len(group_ranks(MP_GROUP))


def dp_rank() -> int:
    """The place in DP_GROUP: ranks of one stage."""
    return _place(DP_GROUP)


def dp_size() -> int:
    """The data-parallel degree, tensor-parallel ranks included."""
    return len(group_ranks(DP_GROUP))


def pp_rank() -> int:
    """The place in PP_GROUP: the stages of one pipeline."""
    return _place(PP_GROUP)


def pp_size() -> int:
    """The pipeline-parallel degree."""
    return len(group_ranks(PP_GROUP))


def tp_rank() -> int:
    """The place in TP_GROUP: ranks that split the same modules."""
    return _place(TP_GROUP)


def tp_size() -> int:
    """The tensor-parallel degree."""
    return len(group_ranks(TP_GROUP))


def rdp_rank() -> int:
    """The place in RDP_GROUP: ranks that hold the same parameters."""
    return _place(RDP_GROUP)


def rdp_size() -> int:
    """The reduced data-parallel degree."""
    return len(group_ranks(RDP_GROUP))


def get_mp_group() -> list[int]:
    """The global ranks of MP_GROUP."""
    return group_ranks(MP_GROUP)


def get_dp_group() -> list[int]:
    """The global ranks of DP_GROUP."""
    return group_ranks(DP_GROUP)


def get_pp_group() -> list[int]:
    """The global ranks of PP_GROUP."""
    return group_ranks(PP_GROUP)


def get_tp_group() -> list[int]:
    """The global ranks of TP_GROUP."""
    return group_ranks(TP_GROUP)


def get_rdp_group() -> list[int]:
    """The global ranks of RDP_GROUP."""
    return group_ranks(RDP_GROUP)


def _process_group(group: CommGroup) -> Any:
    groups = current_runtime().process_groups
    if group.value not in groups:
        raise ConfigError("process groups of torch.distributed exist only with the configuration key ddp=True")
    return groups[group.value]


def get_world_process_group() -> Any:
    """The ``torch.distributed`` group of the whole job; needs ``ddp``."""
    return _process_group(WORLD)


def get_mp_process_group() -> Any:
    """The ``torch.distributed`` group of MP_GROUP; needs ``ddp``."""
    return _process_group(MP_GROUP)


def get_dp_process_group() -> Any:
    """The ``torch.distributed`` group of DP_GROUP; needs ``ddp``."""
    return _process_group(DP_GROUP)


def get_pp_process_group() -> Any:
    """The ``torch.distributed`` group of PP_GROUP; needs ``ddp``."""
    return _process_group(PP_GROUP)


def get_tp_process_group() -> Any:
    """The ``torch.distributed`` group of TP_GROUP; needs ``ddp``."""
    return _process_group(TP_GROUP)


def get_rdp_process_group() -> Any:
    """The ``torch.distributed`` group of RDP_GROUP; needs ``ddp``."""
    return _process_group(RDP_GROUP)
