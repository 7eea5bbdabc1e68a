"""The ranks' vote on a step: it succeeds on all of them, or on none.

A rank votes for a step when it has done all that can go wrong in it. As long as a vote is missing, whatever fails on
any rank undoes the step on every rank; once a rank has all votes, so will the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.job.objects import exchange_in_step
from shardwright.model.updates import Updates, UpdateStatus

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

_CHANNEL = "vote"


def vote(runtime: Runtime) -> None:
    """Tell all ranks of the job that the step is well here, and wait until it is everywhere.

    Raises:
        RemoteError: It has failed on another rank.
        PeerLostError: A rank is gone.
        PartialUpdateError: The weights of ranks may differ.
    """
    others = [rank for rank in range(runtime.place.launch.world_size) if rank != runtime.place.rank]
    own = runtime[Updates].status()
    runtime.step.voted = True
    said = exchange_in_step(runtime, others, _CHANNEL, tuple(own))
    runtime[Updates].compare({runtime.place.rank: own, **{rank: UpdateStatus(*each) for rank, each in said.items()}})
