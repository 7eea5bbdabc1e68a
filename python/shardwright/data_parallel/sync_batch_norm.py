"""``nn.SyncBatchNorm`` in a partitioned model: its forward is a collective that only some ranks take part in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardwright.errors import ConfigError
from shardwright.patches import replaced


def refuse_other_groups(model: nn.Module, dp_ranks: Sequence[int], device: torch.device) -> None:
    """Raise if the group contains ranks on which the module does not run: they never call its collective.

    On the CPU such a module never communicates: torch refuses to train it.
    """
    if device.type == "cpu" or not dist.is_available() or not dist.is_initialized():
        return
    for name, module in model.named_modules():
        if not isinstance(module, nn.SyncBatchNorm):
            continue
        ranks = dist.get_process_group_ranks(module.process_group or dist.group.WORLD)
        if sorted(ranks) != sorted(dp_ranks):
            raise ConfigError(
                f"module {name!r} is a SyncBatchNorm over ranks {ranks}, but with several pipeline ranks it runs on "
                f"one of them in each pipeline, and would wait for the others: give it those that hold the same "
                f"stage, here {list(dp_ranks)}, by nn.SyncBatchNorm.convert_sync_batchnorm(module, "
                "smp.get_dp_process_group()) before smp.DistributedModel"
            )


def synchronises(model: nn.Module, dp_ranks: Sequence[int]) -> bool:
    """Whether forwards of the model are collectives, which need the same order in all replicas."""
    return len(dp_ranks) > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


@contextmanager
def on_one_rank() -> Iterator[None]:
    """Normalize without the other ranks inside the block: a trace runs on one rank only."""
    with replaced(nn.SyncBatchNorm, {"forward": _batch_norm}):
        yield


def _batch_norm(module: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
    return _BatchNorm.forward(module, input)
