"""One rank that goes through many jobs of every kind, and tells what it holds after each."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
import torch.distributed as dist
from shardwright.errors import JobStartError
from shardwright.job.runtime import current_runtime
from torch import nn

from tests.soak.held import Held, give_large_memory_back

WIDTH = 256
#: Rows of a batch: 4 KiB, 16 KiB, 10 MB and 100 MB of activations, which go each its own way between ranks.
SMALL, MEDIUM, LARGE, HUGE = 4, 16, 10_240, 102_400
STEPS = 3


class Scaled(nn.Module):
    """Costs little beside its activations, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.fails = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("this module was told to fail")
        return inputs * self.weight


def rows_of(number: int) -> int:
    if number % 25 == 3:
        return HUGE
    return (SMALL, MEDIUM, LARGE, MEDIUM, SMALL)[number % 5]


@smp.step
def train(model: Any, inputs: torch.Tensor) -> Any:
    outputs = model(inputs)
    loss = outputs.square().mean()
    model.backward(loss)
    return loss, outputs


def folder_of_saves() -> Path:
    """Where both ranks save."""
    return Path(tempfile.gettempdir()) / f"soak-{os.environ['MASTER_PORT']}-saves"


def train_for_a_while(number: int, pipelined: bool) -> list[Any]:
    """Train, fail in some jobs, and leave an object unreceived; what a script might keep of it."""
    torch.manual_seed(number)
    module = nn.Sequential(*(Scaled() for _ in range(4)))
    if pipelined:
        for index in (2, 3):
            smp.set_partition(module[index], 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    inputs = torch.randn(rows_of(number), WIDTH)
    outputs = None
    for step in range(STEPS):
        module[3].fails = number % 20 == 11 and step == 1
        optimizer.zero_grad()
        try:
            loss, outputs = train(model, inputs)
            loss.reduce_mean().item()
        except (ValueError, smp.RemoteError):
            assert module[3].fails
        else:
            optimizer.step()
    smp.send(torch.ones(1 << 16), 1 - smp.rank(), smp.RankType.WORLD_RANK)
    smp.barrier()
    if number % 2:  # the end of the job waits for it
        smp.save_checkpoint(folder_of_saves(), "newest", model=model, optimizer=optimizer, asynchronous=True)
    return [model, optimizer, outputs]


def run(number: int, transport: str) -> tuple[weakref.ref[Any] | None, list[Any]]:
    """One job: the runtime, and what the script keeps of it."""
    pipelined = number % 10 != 7
    degrees = {"pipeline_parallel_degree": 2} if pipelined else {"pipeline_parallel_degree": 1, "ddp": True}
    keys = {"microbatches": 2, "transport": transport, **degrees}
    if number % 10 == 4:
        try:
            smp.init({**keys, "seed": int(os.environ["RANK"])})
        except JobStartError:
            return None, []
        raise AssertionError("ranks with different seeds have started")
    groups = number % 20 == 17
    if groups:
        path = Path(tempfile.gettempdir()) / f"soak-{os.environ['MASTER_PORT']}-{number}"
        dist.init_process_group("gloo", store=dist.FileStore(str(path), 2), rank=int(os.environ["RANK"]), world_size=2)
    smp.init(keys)
    runtime = weakref.ref(current_runtime())
    kept = train_for_a_while(number, pipelined)
    smp.shutdown()
    if groups:
        assert len(dist.distributed_c10d._world.pg_map) == 1, "only the script's own process group is left"
        dist.destroy_process_group()
        path.unlink(missing_ok=True)
    # A notebook keeps its variables: what the system gave has to go all the same.
    return runtime, kept if number % 3 == 0 else []


def main(jobs: int, transport: str) -> None:
    give_large_memory_back()
    for number in range(1, jobs + 1):
        runtime, kept = run(number, transport)
        held = Held.now()
        gc.collect()  # what a thread of the job still held when the last collection began
        is_gone = bool(kept) or runtime is None or runtime() is None
        print(json.dumps({"number": number, "held": held, "runtime_is_gone": is_gone}), flush=True)
        del kept
    shutil.rmtree(folder_of_saves(), ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
