"""What an optimizer's groups hold on this rank, under the names that scripts for the original library read."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from shardwright.job.runtime import find_runtime
from shardwright.sharded_data_parallel.parameters import ShardedParameters


class HeldGroups(Optimizer):
    """The parameters of each group, this rank's shards of them, and both in one tensor, as DeepSpeed's names are.

    Scripts read the shapes. The flat tensors are copies, made when they are asked for: writing to them changes nothing.
    """

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        """The model's parameters of each group on this rank, in the model's dtype."""
        return [list(group["params"]) for group in self.param_groups]

    @property
    def fp16_partitioned_groups(self) -> list[list[torch.Tensor]]:
        """Of each of them what this rank holds: its shard, or the parameter itself where it is whole."""
        return [[one.detach() for one in group] for group in self._held()]

    @property
    def fp16_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """The same, one after another in one tensor of 1 dim for each group; an empty one for an empty group."""
        return [_flat(group) for group in self._held()]

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """The same in float32: of master weights, where there are some."""
        groups, masters = self._held(), vars(self).get("_masters")
        if masters is not None:
            kept = [dict(masters.copies(group)) for group in groups]
            groups = [
                [of.get(place, one) for place, one in enumerate(group)] for of, group in zip(kept, groups, strict=True)
            ]
        return [_flat([one.float() for one in group]) for group in groups]

    def _held(self) -> list[list[torch.Tensor]]:
        runtime = find_runtime()
        registry = None if runtime is None else runtime.find(ShardedParameters)
        return (
            self.fp16_groups
            if registry is None
            else [[registry.local(one) for one in group] for group in self.fp16_groups]
        )


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in tensors]) if tensors else torch.empty(0)
