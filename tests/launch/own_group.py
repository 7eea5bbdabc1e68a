"""Ranks that torch knows and no launcher: two processes, each a rank of a process group that the script makes.

Each of several starts, in order, says in a line what came of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
import torch.distributed as dist
from torch import nn

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@smp.step
def train(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().sum()
    model.backward(loss)
    return loss


def trained(config: dict[str, Any]) -> dict[str, Any]:
    """Train a step on other samples than the other rank; the weight then tells whose gradients were averaged."""
    smp.init(config)
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25))
    data_rank = smp.dp_rank() if smp.dp_size() > 1 else 0
    train(model, torch.full((1, 1), float(data_rank)))
    optimizer.step()
    weights = {name: one.item() for name, one in model.state_dict().items()}
    return {"place": [smp.rank(), smp.size(), smp.local_rank(), smp.local_size()], "weights": list(weights.values())}


def alone_then_group(group: Callable[[], None]) -> dict[str, Any]:
    smp.init({"ddp": True})
    group()
    return {"model": str(smp.DistributedModel(nn.Linear(1, 1)))}


def one(name: str, rank: int, folder: Path) -> dict[str, Any]:
    def group() -> None:
        method = f"file://{folder / name.replace(' ', '-')}"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)

    if name == "group after":
        return alone_then_group(group)
    group()
    if name == "replicas":
        return trained({"ddp": True})
    if name == "pipeline":
        return trained({"pipeline_parallel_degree": 2})
    if name == "as a launcher of one":
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if name == "as lightning":
        os.environ.update(WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    if name == "contradicted on one rank" and rank == 1:
        os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    if name == "known to one rank" and rank == 0:
        os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    if name == "another back end":
        return trained({"ddp": True, "ddp_dist_backend": "nccl"})
    if name == "not called" and rank == 1:
        dist.barrier()
        return {"waited": True}
    try:
        return trained({"ddp": True, "connect_timeout_seconds": 2.0 if name == "not called" else 60.0})
    finally:
        if name == "not called":
            dist.barrier()


NAMES = (
    "replicas",
    "pipeline",
    "as a launcher of one",
    "as lightning",
    "known to one rank",
    "contradicted on one rank",
    "another back end",
    "not called",
    "group after",
)


def worker(rank: int, folder: Path) -> None:
    for name in NAMES:
        for variable in VARIABLES:
            os.environ.pop(variable, None)
        try:
            found = one(name, rank, folder)
        except Exception as error:
            found = {"error": type(error).__name__, "text": str(error)}
        smp.shutdown()
        dist.destroy_process_group()
        print(json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))
