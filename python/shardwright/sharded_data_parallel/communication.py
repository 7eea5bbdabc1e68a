"""Gathers and reductions over the ranks among which parameters are sharded, which notice a failure elsewhere."""

from __future__ import annotations

import torch

from shardwright.data_parallel.collectives import Collectives, ReplicaCollectives
from shardwright.job.queued import QueuedCollectives
from shardwright.job.runtime import Runtime


class ShardCollectives:
    """Gathers and reduces over the ranks among which parameters are sharded."""

    def __init__(self, runtime: Runtime) -> None:
        """Use the collectives of a rank."""
        self._runtime = runtime

    @property
    def _over_shards(self) -> Collectives:
        found = self._runtime[ReplicaCollectives].shards
        assert found is not None, "made with the process groups"
        return found

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._over_shards.ranks)

    @property
    def place(self) -> int:
        """The index of this rank."""
        return self._over_shards.own_place

    @property
    def waits_at_once(self) -> bool:
        """Whether a collective is over when its call returns, so that none overlaps computation."""
        return not self._over_shards.orders_streams(self._runtime.place.device)

    def gather(self, whole: torch.Tensor) -> None:
        """Gather a 1-D tensor of which each rank has its part, in the order of ranks."""
        levels = self._runtime[ReplicaCollectives].gathers
        if not levels:
            self._begin(self._over_shards)
            self._over_shards.wait(self._over_shards.gather(whole))
            return
        between, within = levels
        hosts, ranks = len(between.ranks), len(within.ranks)
        parts = whole.view(hosts, ranks, -1)
        of_hosts = torch.empty_like(parts[:, 0])
        of_hosts[between.own_place] = parts[between.own_place, within.own_place]
        self._begin(between)
        between.wait(between.gather(of_hosts.view(-1)))
        of_ranks = whole.new_empty(ranks, hosts, parts.shape[-1])
        of_ranks[within.own_place] = of_hosts
        self._begin(within)
        within.wait(within.gather(of_ranks.view(-1)))
        parts.copy_(of_ranks.transpose(0, 1))

    def scatter(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Sum a 1-D tensor, and give each rank its part of the sum."""
        self._begin(self._over_shards)
        self._over_shards.wait(self._over_shards.scatter(whole, part))

    def finish(self) -> None:
        """Wait for all collectives, watching for a failure elsewhere."""
        self._runtime[QueuedCollectives].finish()

    def _begin(self, collectives: Collectives) -> None:
        if not self._runtime.step.running:
            collectives.begin_between_steps()
