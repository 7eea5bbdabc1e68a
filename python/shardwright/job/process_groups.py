"""The process groups of ``torch.distributed`` for the groups of ranks (spec, 2.2).

They exist with the configuration key ``ddp`` in a job of several ranks; otherwise these functions raise
:class:`ConfigError`.
"""

from __future__ import annotations

from typing import Any

from shardwright.errors import ConfigError
from shardwright.job.ranks import DP_GROUP, MP_GROUP, PP_GROUP, RDP_GROUP, TP_GROUP, WORLD, CommGroup
from shardwright.job.runtime import current_runtime


def _process_group(group: CommGroup) -> Any:
    groups = current_runtime().process_groups
    if group.value not in groups:
        raise ConfigError("process groups of torch.distributed exist only with the configuration key ddp=True")
    return groups[group.value]


def get_world_process_group() -> Any:
    """Return the ``torch.distributed`` process group of WORLD (spec, 2.2)."""
    return _process_group(WORLD)


def get_mp_process_group() -> Any:
    """Return the ``torch.distributed`` process group of MP_GROUP (spec, 2.2)."""
    return _process_group(MP_GROUP)


def get_dp_process_group() -> Any:
    """Return the ``torch.distributed`` process group of DP_GROUP (spec, 2.2)."""
    return _process_group(DP_GROUP)


def get_pp_process_group() -> Any:
    """Return the ``torch.distributed`` process group of PP_GROUP (spec, 2.2)."""
    return _process_group(PP_GROUP)


def get_tp_process_group() -> Any:
    """Return the ``torch.distributed`` process group of TP_GROUP (spec, 2.2)."""
    return _process_group(TP_GROUP)


def get_rdp_process_group() -> Any:
    """Return the ``torch.distributed`` process group of RDP_GROUP (spec, 2.2)."""
    return _process_group(RDP_GROUP)
