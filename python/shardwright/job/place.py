"""The immutable state of a rank: configuration, groups, and launcher."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardwright import _core
from shardwright.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """A rank's position in its job: the effective configuration, ranks and groups, and how the process was started."""

    cfg: Any
    topology: _core.Topology
    launch: _core.LaunchInfo

    @cached_property
    def rank(self) -> int:
        """The global rank."""
        return self.launch.rank

    @cached_property
    def pp_ranks(self) -> list[int]:
        """The global ranks of this rank's PP_GROUP."""
        return self._group("PP_GROUP")

    @cached_property
    def dp_ranks(self) -> list[int]:
        """The global ranks of DP_GROUP."""
        return self._group("DP_GROUP")

    @cached_property
    def tp_ranks(self) -> list[int]:
        """The global ranks of TP_GROUP."""
        return self._group("TP_GROUP")

    @cached_property
    def rdp_ranks(self) -> list[int]:
        """The global ranks of RDP_GROUP."""
        return self._group("RDP_GROUP")

    @cached_property
    def pp_size(self) -> int:
        """The pipeline-parallel degree."""
        return len(self.pp_ranks)

    @cached_property
    def pp_rank(self) -> int:
        """The index in PP_GROUP."""
        return self.pp_ranks.index(self.rank)

    @cached_property
    def is_root(self) -> bool:
        """Whether this rank runs the step function."""
        return self.pp_rank == 0

    @cached_property
    def sample_ranks(self) -> list[int]:
        """The global ranks among which the samples of a batch are divided, one of each replica.

        With ``prescaled_batch`` the ranks of a TP_GROUP have the same samples.
        """
        return self.rdp_ranks if self.cfg.prescaled_batch else self.dp_ranks

    @cached_property
    def tensor_divisor(self) -> int:
        """The divisor of gradients over the samples of a TP_GROUP, for the mean over data-parallel ranks.

        With ``prescaled_batch`` its ranks have the same samples, whose loss counts once.
        """
        return 1 if self.cfg.prescaled_batch else len(self.tp_ranks)

    @cached_property
    def shards_optimizer_state(self) -> bool:
        """Whether each data-parallel rank keeps a share of the optimizer's state."""
        return bool(self.cfg.shard_optimizer_state) and len(self.dp_ranks) > 1

    @property
    def shards_parameters(self) -> bool:
        """Whether data-parallel ranks hold shards of parameters (``sharded_data_parallel_degree``)."""
        return int(self.cfg.sharded_data_parallel_degree) > 1

    @property
    def divides_updates(self) -> bool:
        """Whether data-parallel ranks hold shards of parameters, or of the state of optimizers."""
        return self.shards_parameters or self.shards_optimizer_state

    @cached_property
    def shard_ranks(self) -> list[int]:
        """The global ranks among which parameters are sharded."""
        return self.shard_groups(self.rank)[0]

    def shard_groups(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the ranks among which a rank's parameters are sharded, and those that have the same shards as it."""
        degree = int(self.cfg.sharded_data_parallel_degree)
        replicas = list(self.topology.group("DP_GROUP", rank))
        place = replicas.index(rank)
        first = place // degree * degree
        return replicas[first : first + degree], replicas[place % degree :: degree]

    @cached_property
    def device(self) -> torch.device:
        """The device of this rank: that of the script's thread in ``smp.init``, or the CPU where there is no GPU.

        Threads each have a current device, which for a new one is the first.
        """
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def make_device_current(self) -> None:
        """Have the calling thread compute on this rank's device where it names none."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def check_device(self) -> None:
        """Raise if the script has made another device current since ``smp.init``.

        Raises:
            ConfigError: It has.
        """
        if self.device.type != "cuda" or (current := torch.cuda.current_device()) == self.device.index:
            return
        raise ConfigError(
            f"smp.DistributedModel: the current device of rank {self.rank} is cuda:{current}, but smp.init has "
            f"given it {self.device}: call torch.cuda.set_device({current}) before "
            "smp.init (the environment of each launcher has the local rank), or let each rank see its own device only "
            "(CUDA_VISIBLE_DEVICES)"
        )

    def other_roots(self) -> list[int]:
        """The roots of the other replicas, as global ranks."""
        return [rank for rank in self.dp_ranks if rank != self.rank]

    def _group(self, kind: str) -> list[int]:
        return list(self.topology.group(kind, self.rank))
