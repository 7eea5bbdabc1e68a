"""On rank 1, the last weight gradients of a step under zero_bubble fail when the root waits for nothing but votes."""

from __future__ import annotations

import time
from typing import Any

import common
import shardwright as smp
import torch
from common import fault, raise_script_error, say
from shardwright.frames.weights import WeightGradients
from shardwright.step import run


def raise_late() -> None:
    """Raise once the root has long ended its part."""
    time.sleep(1.0)
    say("raises")
    raise_script_error()


def main() -> None:
    usual_run, usual_vote = WeightGradients.run, run.vote

    def visited_run(left: WeightGradients) -> None:
        fault.visited("weights", "backward")
        usual_run(left)

    def reported_vote(runtime: Any) -> None:
        say("votes", step=runtime.step.number)
        usual_vote(runtime)

    WeightGradients.run = visited_run  # type: ignore[method-assign]
    run.vote = reported_vote
    job = common.start(pipeline="zero_bubble")
    say("exact", error=job.exact_step())
    last = fault.visits["weights", "backward"]
    before = job.state()
    if smp.rank() == 1:
        fault.arm("weights", "backward", raise_late, last)
    try:
        job.step()
    except Exception as error:
        failure = common.describe(error)
    else:
        failure = None
    fault.disarm()
    same = all(torch.equal(a, b) for a, b in zip(before, job.state(), strict=True))
    say("failed", failure=failure, restored=same, weight_gradients=last)
    say("exact", error=job.exact_step())


if __name__ == "__main__":
    main()
