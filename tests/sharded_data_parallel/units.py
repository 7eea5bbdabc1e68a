"""How parameters are gathered: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.job.runtime import current_runtime

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


def prefetching(allowed: bool) -> None:
    """Whether a unit has the next one gathered while its own parameters are whole."""
    pair = Pair("blocks")
    sharding = pair.model.placement.sharding
    assert sharding is not None
    inner = sharding._modules[:-1]
    states = [module._get_fsdp_state() for module in inner]
    assert [bool(state._states_to_backward_prefetch) for state in states] == [not allowed] * len(states)
    pair.run(2)
