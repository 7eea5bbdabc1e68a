"""A rank of a job whose tiles are on several ranks: trains, and compares each step with ``nn.Linear`` in one process.

``tiled_linear.py PP SCENARIO...``; the world size gives the replicas. Each scenario is a job of its own in the same
processes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import shardwright as smp
import torch
from shardwright.data_parallel.shards import ParameterShards
from shardwright.job.runtime import current_runtime
from torch import nn

from tests.optimizer_sharding.shares import owned_elements, whole_gradients
from tests.parity_memory.recomputed import Recomputed

STEPS, MICROBATCHES, IN_SPLITS, OUT_SPLITS = 4, 2, 2, 3
#: Features of the model, of the tiled layer's input and of its output: tensors that cross are below 4 KiB, or above.
SIZES = {"small": (3, 7, 5), "large": (24, 150, 130)}
ROWS = 16


class Model(nn.Module):
    """A large layer between two small ones."""

    def __init__(self, size: str, *, tiled: bool) -> None:
        super().__init__()
        features, inner, outer = SIZES[size]
        self.first = nn.Linear(features, inner)
        self.large: Any = (
            smp.nn.TiledLinear(inner, outer, in_splits=IN_SPLITS, out_splits=OUT_SPLITS)
            if tiled
            else nn.Linear(inner, outer)
        )
        self.last = nn.Linear(outer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.last(torch.tanh(self.large(torch.tanh(self.first(x))))))


def of_tiles(name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return what of a whole parameter of ``nn.Linear`` a parameter with this name should have."""
    if ".tiles." not in name:
        return whole
    _, _, row, column, kind = name.split(".")
    part = whole.tensor_split(OUT_SPLITS)[int(row)]
    return part.tensor_split(IN_SPLITS, 1)[int(column)] if kind == "weight" else part


def name_of_whole(name: str) -> str:
    head, found, tail = name.partition(".tiles.")
    return f"{head}.{tail.rpartition('.')[2]}" if found else name


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def compare(model: Any, whole: nn.Module, what: str) -> float:
    """Hold gradients and values of this rank's own parameters against those of one process."""
    is_sharded = current_runtime().find(ParameterShards) is not None
    gradients = whole_gradients(model) if is_sharded else {}
    worst = 0.0
    for name, parameter in model.local_named_parameters():
        expected = whole.get_parameter(name_of_whole(name))
        assert expected.grad is not None
        gradient = gradients.get(name, parameter.grad)
        assert gradient is not None, f"{what}: {name} has no gradient"
        for kind, mine, theirs in (("gradient", gradient, expected.grad), ("value", parameter, expected)):
            found = error(mine.detach(), of_tiles(name, theirs.detach()))
            assert found < 1e-12, f"{what}: {kind} of {name} is off by {found}"
            worst = max(worst, found)
    return worst


def data(step: int, replica: int, size: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randn(ROWS, 3, SIZES[size][0], generator=generator)


def run(pp: int, scenario: str) -> None:
    size, *how = scenario.split(",")
    automatic, delayed = "automatic" in how, "delayed" in how
    smp.init(
        {
            "pipeline_parallel_degree": pp,
            "microbatches": MICROBATCHES,
            "ddp": True,
            "auto_partition": automatic,
            **({} if automatic else {"default_partition": 0}),
            "shard_optimizer_state": "sharded" in how,
        }
    )
    torch.manual_seed(5)
    whole = Model(size, tiled=False)
    torch.manual_seed(5)
    with smp.delay_param_initialization(delayed):
        module = Model(size, tiled=True)
    tiles: Any = module.large.tiles
    if not automatic:
        for row in range(OUT_SPLITS):
            for column in range(IN_SPLITS):
                smp.set_partition(tiles[row][column], (row + column) % pp)
    model = smp.DistributedModel(module)
    if "checkpointed" in how:
        smp.set_activation_checkpointing(module.large)
    if "tiles_checkpointed" in how:
        for tile in (tile for row in tiles for tile in row):
            smp.set_activation_checkpointing(tile)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3))
    reference = torch.optim.Adam(whole.parameters(), lr=0.01, eps=1e-3)

    @smp.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    worst, recomputed = 0.0, Recomputed()
    for step in range(STEPS):
        optimizer.zero_grad()
        reference.zero_grad()
        loss = train(model, data(step, smp.dp_rank(), size))
        losses = [whole(data(step, replica, size)).square().mean() for replica in range(smp.dp_size())]
        torch.stack(losses).mean().backward()
        worst = max(worst, error(loss.reduce_mean(), losses[smp.dp_rank()].detach()))
        worst = max(worst, compare(model, whole, f"{scenario}, step {step}"))
        optimizer.step()
        reference.step()
    is_checkpointed = "checkpointed" in how or "tiles_checkpointed" in how
    assert (recomputed.end() > 0) == is_checkpointed
    names = [name for name, _ in model.local_named_parameters() if ".tiles." in name]
    assert 0 < len(names) < len(list(module.large.parameters())), f"rank {smp.pp_rank()} has the tiles {names}"
    if "sharded" in how:
        assert 0 < owned_elements(model) < sum(one.numel() for one in model.local_parameters())
    refused = ""
    try:
        module.large.to_linear()
    except smp.NotOwnedError as problem:
        refused = str(problem)
    assert "tiles." in refused, refused
    loaded = Model(size, tiled=True)
    loaded.load_state_dict(model.state_dict())
    assert error(loaded.large.to_linear().weight.detach(), whole.large.weight.detach()) < 1e-12
    routes = smp.comm_stats()["routes"]
    counts = [routes[route]["tensors_received"] for route in ("in_message", "shared_memory")]
    print(json.dumps({"scenario": scenario, "worst": worst, "small": counts[0], "large": counts[1]}))


def main() -> None:
    torch.set_default_dtype(torch.float64)
    for scenario in sys.argv[2:]:
        run(int(sys.argv[1]), scenario)
        smp.shutdown()


if __name__ == "__main__":
    main()
