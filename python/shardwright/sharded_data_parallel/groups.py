"""The process groups of sharded data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch.distributed as dist

from shardwright.data_parallel.collectives import Collectives, ReplicaCollectives
from shardwright.job.runtime import Runtime

#: The ranks among which parameters are sharded, and those that have the same shards.
SHARDS, GROUPS = "SHARD_GROUP", "SHARD_REPLICA_GROUP"
#: For a gather in two levels: one rank of each host, and the ranks of one host.
BETWEEN_HOSTS, WITHIN_HOST = "BETWEEN_HOSTS", "WITHIN_HOST"


def make_process_group(runtime: Runtime, name: str, groups: Iterable[Sequence[int]]) -> list[int]:
    """Make process groups of disjoint ranks; return the ranks of this rank's own, empty without one.

    All ranks of the job must call this, with the same groups. Each rank makes every group, in one order.
    """
    own: list[int] = []
    for ranks in sorted({tuple(ranks) for ranks in groups}):
        group = dist.new_group(list(ranks))
        if runtime.place.rank in ranks:
            runtime.process_groups[name] = group
            own = list(ranks)
    return own


def make_sharding_groups(runtime: Runtime) -> None:
    """Make the process groups of sharded data parallelism, with the collectives over them. All ranks call this."""
    found = runtime[ReplicaCollectives]
    by_rank = [runtime.place.shard_groups(rank) for rank in range(runtime.place.launch.world_size)]
    found.shards = Collectives(runtime, SHARDS, make_process_group(runtime, SHARDS, [ranks for ranks, _ in by_rank]))
    groups = make_process_group(runtime, GROUPS, [ranks for _, ranks in by_rank])
    if len(groups) > 1:
        found.groups = Collectives(runtime, GROUPS, groups)
    if runtime.place.cfg.sdp_hierarchical_allgather:
        _make_levels(runtime, [ranks for ranks, _ in by_rank])


def _make_levels(runtime: Runtime, groups: Iterable[Sequence[int]]) -> None:
    """Make the groups of a gather in two levels, where each host has the same number of a group's ranks, in order."""
    levels = [hosts for ranks in groups if is_two_level(hosts := by_host(ranks, runtime.node.host), ranks)]
    between = make_process_group(
        runtime, BETWEEN_HOSTS, [each for hosts in levels for each in zip(*hosts, strict=True)]
    )
    within = make_process_group(runtime, WITHIN_HOST, [each for hosts in levels for each in hosts])
    if between:
        runtime[ReplicaCollectives].gathers = (
            Collectives(runtime, BETWEEN_HOSTS, between),
            Collectives(runtime, WITHIN_HOST, within),
        )


def by_host(ranks: Sequence[int], host: Callable[[int], str]) -> list[list[int]]:
    """Return the ranks of each host, given the host of a rank."""
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(host(rank), []).append(rank)
    return list(hosts.values())


def is_two_level(hosts: Sequence[Sequence[int]], ranks: Sequence[int]) -> bool:
    """Whether there are several hosts with the same number of ranks, of several, and in the order of all ranks."""
    sizes = {len(own) for own in hosts}
    return len(hosts) > 1 and len(sizes) == 1 and sizes != {1} and list(chain(*hosts)) == list(ranks)
