"""What a step's gradients are divided by, agreed on by the data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.data_parallel.shards import ParameterShards
from shardwright.data_parallel.weights import StepWeights
from shardwright.errors import ShardwrightError
from shardwright.job.objects import exchange_in_step
from shardwright.job.runtime import Runtime

#: What a data-parallel rank says of its step.
_ABSENT, _UNWEIGHTED, _WEIGHTED = 0, 1, 2
_CHANNEL = "weights"


class Divisor(NamedTuple):
    """What this rank's gradients are divided by for the mean over microbatches.

    Attributes:
        value: The number of microbatches, or what makes the mean over all data-parallel ranks the weighted one.
        weighted: Whether weights were given.
    """

    value: float
    weighted: bool


def agreed_divisor(runtime: Runtime) -> Divisor:
    """What gradients are divided by, agreed on by the data-parallel ranks, which wait here for each other.

    Raises:
        ShardwrightError: Some of the replicas gave weights, and others did not.
    """
    own = runtime[StepWeights].total
    if runtime[ReplicaCollectives].dp is None or not torch.is_grad_enabled():
        return Divisor(runtime.step.num_microbatches, False) if own is None else Divisor(own or 1.0, True)
    totals = exchange(runtime, _UNWEIGHTED if own is None else _WEIGHTED, own or 0.0)
    present = {rank: note for rank, note in zip(runtime.place.dp_ranks, totals, strict=True) if note[0] != _ABSENT}
    without = [rank for rank, note in present.items() if note[0] == _UNWEIGHTED]
    if 0 < len(without) < len(present):
        raise ShardwrightError(
            f"step {runtime.step.number}: of the data-parallel ranks {list(present)}, {without} called model.backward "
            "without a weight and the others with one; give weights on all of them or on none"
        )
    if without:
        return Divisor(runtime.step.num_microbatches, False)
    # Where nothing counts, as where no sample has a label, the sum of gradients is zero, and so is the mean.
    return Divisor(math.fsum(total for _, total in totals) / len(totals) or 1.0, True)


def exchange(runtime: Runtime, kind: int = _ABSENT, total: float = 0.0) -> list[tuple[int, float]]:
    """Tell the data-parallel ranks the sum of this rank's weights; returns what each of them says, in their order.

    By messages and not by a collective, whose place among those that backward has begun would differ from rank to rank.

    Raises:
        ShardwrightError: Ranks have different owners of parameters, to whom gradients are to be reduced.
    """
    digests = runtime[ParameterShards].digests
    said = exchange_in_step(runtime, runtime.place.other_roots(), _CHANNEL, (kind, total, *digests))
    said[runtime.place.rank] = (kind, total, *digests)
    check_digests(runtime, {rank: (over_dp, over_rdp) for rank, (_, _, over_dp, over_rdp) in said.items()})
    return [said[rank][:2] for rank in runtime.place.dp_ranks]


def check_digests(runtime: Runtime, digests: Mapping[int, tuple[str, str]]) -> None:
    """Check that data-parallel ranks have assigned the same owners.

    Raises:
        ShardwrightError: They have not.
    """
    same_part = [digests[rank][1] for rank in runtime.place.rdp_ranks]
    if len({over_dp for over_dp, _ in digests.values()}) > 1 or len({*same_part}) > 1:
        raise ShardwrightError(
            f"data-parallel ranks {runtime.place.dp_ranks} do not shard the same optimizers: with "
            "shard_optimizer_state, all of them have to create the same smp.DistributedOptimizers in the same order, "
            "with the same parameter groups"
        )
