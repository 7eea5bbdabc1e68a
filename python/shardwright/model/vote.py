"""The ranks' vote on a step: it succeeds on all of them, or on none.

A rank votes for a step when it has completed everything that can fail. As long as a vote is missing, a failure on any
rank undoes the step on every rank. Once a rank has all votes, every other rank will receive them too.
"""

from __future__ import annotations

from shardwright.job.objects import exchange_in_step
from shardwright.job.queued import QueuedCollectives
from shardwright.job.runtime import Runtime
from shardwright.model.updates import Updates, UpdateStatus

_CHANNEL = "vote"


def vote(runtime: Runtime) -> None:
    """Send this rank's vote for the step to all ranks of the job, and wait for theirs."""
    runtime[QueuedCollectives].finish()  # what a device may still fail in
    others = [rank for rank in range(runtime.place.launch.world_size) if rank != runtime.place.rank]
    own = runtime[Updates].status()
    runtime.step.voted = True
    said = exchange_in_step(runtime, others, _CHANNEL, tuple(own))
    runtime[Updates].compare({runtime.place.rank: own, **{rank: UpdateStatus(*each) for rank, each in said.items()}})
