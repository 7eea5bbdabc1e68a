"""How parameters are gathered: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.job.runtime import current_runtime
from torch import nn

from .problems import Pair

_MICROBATCHES = 2


def gathers(units: int, each_microbatch: int) -> None:
    """How many collectives a step takes: gathers of each unit, and reductions."""
    pair = Pair("blocks")
    sharding = pair.model.placement.sharding
    assert sharding is not None
    assert len(sharding._groups) == units
    pair.run(2)
    shards = current_runtime()[ReplicaCollectives].shards
    assert shards is not None
    before = shards.begun
    pair.zero_grad()
    pair.train(2)
    stage = int(current_runtime().place.cfg.sdp_stage)
    gathered = units * each_microbatch * (_MICROBATCHES if stage == 3 else 1)
    reduced = units * (1 if stage == 1 else _MICROBATCHES)
    assert shards.begun - before == gathered + reduced, (shards.begun - before, gathered, reduced)


def no_prefetching() -> None:
    """No unit's parameters are whole before its turn, and gradients that were reduced are freed."""
    pair = Pair("blocks")
    sharding = pair.model.placement.sharding
    assert sharding is not None
    gathered: list[int] = []

    def look(*_: object) -> None:
        gathered.append(sum(group.is_unsharded or bool(group._all_gather_result) for group in sharding._groups))
        assert sharding._groups[0].comm_ctx.reduce_scatter_state is None

    for module in pair.model.modules():
        if isinstance(module, nn.Tanh):
            module.register_full_backward_pre_hook(look)
    pair.run(2)
    assert set(gathered) == {1}, gathered
