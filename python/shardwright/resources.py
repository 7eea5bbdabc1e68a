"""What a rank needs of the system, and has: file descriptors, address space, shared memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any, NamedTuple

from shardwright import _core

_MIB = 1 << 20
#: Descriptors of a rank: its own, for each rank of the job, what process groups and UCX add; measured, with a margin.
_DESCRIPTORS, _DESCRIPTORS_A_RANK = 20, 3
_OF_GROUPS, _OF_GROUPS_A_RANK = 32, 5
_OF_UCX, _OF_UCX_A_RANK = 20, 2
#: Address space that threads, their stacks and heaps take, likewise.
_SPACE, _SPACE_A_RANK, _SPACE_OF_GROUPS, _SPACE_OF_UCX = 512 * _MIB, 128 * _MIB, 512 * _MIB, 2048 * _MIB
#: Of what is left, buffers take so much at most.
_SHARE_OF_BUFFERS = 2
#: A smaller buffer is none.
_LEAST_BUFFER_BYTES = 4 * _MIB


class Means(NamedTuple):
    """What a rank can do with what it has.

    Attributes:
        buffer_bytes: The size of its persistent buffer; 0 for none.
        ucx: Whether there is enough for UCX.
        lacks: What is missing for any job, as the rest of a sentence about the rank; None where nothing is.
    """

    buffer_bytes: int
    ucx: bool
    lacks: str | None = None


def means(launch: _core.LaunchInfo, cfg: Any) -> Means:
    """Look at the limits of this process; the one of descriptors is raised as far as it may be, where that helps."""
    world = launch.world_size
    wanted = 0 if cfg.transport == "tcp" else int(cfg.comm_buffer_bytes)
    groups = bool(cfg.ddp)
    descriptors = _count_descriptors() + _DESCRIPTORS + _DESCRIPTORS_A_RANK * world
    descriptors += groups * (_OF_GROUPS + _OF_GROUPS_A_RANK * world)
    with_ucx = descriptors + _OF_UCX + _OF_UCX_A_RANK * world
    limit = _raise_descriptor_limit(with_ucx)
    if limit < descriptors:
        return Means(
            0,
            False,
            f"may open {limit} file descriptors, and needs {descriptors} in a job of {world} ranks"
            f"{' with process groups' if groups else ''}: raise the limit (ulimit -n {max(1024, with_ucx)}) on every "
            "rank",
        )
    ucx = limit >= with_ucx
    space = _free_address_space()
    if space is not None:
        needed = _SPACE + _SPACE_A_RANK * world + groups * _SPACE_OF_GROUPS
        if space < needed:
            total = resource.getrlimit(resource.RLIMIT_AS)[0]
            return Means(
                0,
                False,
                f"may use {total // _MIB} MiB of address space, of which {space // _MIB} MiB are free, and needs "
                f"{needed // _MIB} MiB more in a job of {world} ranks: raise the limit "
                f"(ulimit -v {(total - space + needed) // 1024}) on every rank, or remove it",
            )
        ucx = ucx and space >= needed + _SPACE_OF_UCX
        left = max(space - needed - ucx * _SPACE_OF_UCX, 0)
        # A rank maps its own buffer and those of the other ranks of its host.
        wanted = min(wanted, left // _SHARE_OF_BUFFERS // max(launch.local_size, 1))
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest != resource.RLIM_INFINITY:
        wanted = min(wanted, largest // 2)
    return Means(wanted if wanted >= min(_LEAST_BUFFER_BYTES, int(cfg.comm_buffer_bytes)) else 0, ucx)


def _count_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # there is none left to look with
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _raise_descriptor_limit(wanted: int) -> int:
    """How many descriptors this process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):
            return soft
        return most
    return soft


def _free_address_space() -> int | None:
    """How many bytes of address space are left under the limit; None where there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(limit - pages * resource.getpagesize(), 0)
