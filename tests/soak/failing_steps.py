"""One rank of a job in which every tenth step fails, is caught on every rank, and training goes on."""

from __future__ import annotations

import json
import sys

import shardwright as smp
import torch
from torch import nn

from tests.soak.held import Held, give_large_memory_back
from tests.soak.job_after_job import LARGE, MEDIUM, SMALL, WIDTH, Scaled, train

#: How many samples there are of a run.
SAMPLES = 20


def main(steps: int, transport: str) -> None:
    give_large_memory_back()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "transport": transport})
    module = nn.Sequential(*(Scaled() for _ in range(4)))
    for index in (2, 3):
        smp.set_partition(module[index], 1)
    parts = list(module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    failed = 0
    for step in range(1, steps + 1):
        rows = LARGE if step % 50 in (9, 10) else SMALL if step % 2 else MEDIUM
        failing = parts[step // 10 % len(parts)]
        failing.fails = step % 10 == 0
        optimizer.zero_grad()
        try:
            loss, outputs = train(model, torch.randn(rows, WIDTH))
            loss.reduce_mean().item()
            if step % 7 == 0:
                outputs.concat()
        except (ValueError, smp.RemoteError):
            assert failing.fails
            failed += 1
        else:
            assert not failing.fails
            optimizer.step()
            del loss, outputs
        failing.fails = False
        if step % (steps // SAMPLES) == 0:
            smp.barrier()
            print(json.dumps({"number": step, "held": Held.now(), "failed": failed}), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
