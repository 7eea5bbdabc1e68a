"""A rank whose second computations wait until what the next ones need is back.

usage: ahead.py HORIZON
"""

from __future__ import annotations

import json
import sys
import time

import shardwright as smp
import torch
from shardwright.job.runtime import current_runtime
from shardwright.offloading import OffloadedActivations, activations
from torch import nn

from tests.jobs.patience import HANG_SECONDS
from tests.offloading.model import ROWS, WIDTH, start, train

MICROBATCHES, BLOCKS = 4, 8
in_time = 0


class Waiting(nn.Module):
    """A layer that waits, when it is computed again, until nothing is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            wait_until_all_is_back()
        return torch.tanh(self.dense(x))


def wait_until_all_is_back() -> None:
    global in_time
    offloaded, until = current_runtime()[OffloadedActivations], time.monotonic() + HANG_SECONDS
    while offloaded.counts()["on_the_way"] > 0:
        if time.monotonic() > until:
            raise TimeoutError("a tensor does not come back")
        time.sleep(0.0005)
    in_time += 1


def main() -> None:
    activations.MOST_OUTGOING_BYTES = 0
    blocks = [Waiting() for _ in range(BLOCKS)]
    model = start(*blocks, horizon=int(sys.argv[1]), microbatches=MICROBATCHES, pipeline="simple")
    for _ in range(3):
        train(model, torch.randn(MICROBATCHES * ROWS, WIDTH))
    counts = dict(current_runtime()[OffloadedActivations].counts())
    print("found: " + json.dumps({"counts": counts, "in_time": in_time}), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
