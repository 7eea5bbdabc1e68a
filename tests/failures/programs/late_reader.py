"""Rank 1 looks at what the last step returned when rank 0 has long come to its end: ``late_reader.py HOW WIDTH``."""

from __future__ import annotations

import sys
import time

import shardwright as smp
import torch
from common import say
from torch import nn


@smp.step
def evaluate(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(batch)
    return output


def main() -> None:
    how, width = sys.argv[1], int(sys.argv[2])
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, width))
    batch = torch.randn(8, 8)
    with torch.no_grad():
        wanted = torch.cat([whole(part) for part in batch.chunk(2)])
    model = smp.DistributedModel(whole)
    smp.set_partition(model.module[1], 1)
    with torch.no_grad():
        outputs = [evaluate(model, batch) for _ in range(3)]
    if smp.rank() == 1:
        time.sleep(2.5 if how == "reads" else 0.5)
        if how == "waits for the other":
            smp.recv_from(0, smp.RankType.WORLD_RANK)
        if how == "reads":
            say("read", same=all(torch.equal(output.concat(), wanted) for output in outputs))
    elif how == "raises":
        raise ValueError("an error of the script")


if __name__ == "__main__":
    main()
