"""Optimizer state in host memory on a CUDA device: the numbers of a run without it, and device memory that falls."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.optimizer.offloading import chunks
from torch import nn

pytestmark = pytest.mark.gpu

WIDTH, LAYERS, STEPS = 2048, 6, 4


def trained(where: Any, kind: Any, dtype: str | None = None) -> dict[str, Any]:
    """Train, and return weights, state and the device memory that is in use between steps."""
    gc.collect()  # what an earlier run left in cycles
    before = torch.cuda.memory_allocated()
    smp.init({"offload_optimizer": where, **({} if dtype is None else {dtype: True})})
    try:
        torch.manual_seed(5)
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
        model: Any = smp.DistributedModel(module)
        wrap: Any = smp.DistributedOptimizer
        optimizer = wrap(kind(model.parameters()))

        @smp.step
        def train(model: Any, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).float().square().mean()
            model.backward(loss)
            return loss.detach()

        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
            train(model, x.to(next(model.parameters()).dtype))
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        report = smp.memory_report()[0]
        return {
            "weights": [one.detach().cpu() for one in model.parameters()],
            "state": [
                value.cpu() for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)
            ],
            "held": torch.cuda.memory_allocated() - before,
            "offloaded": report["offloaded_optimizer_state"],
        }
    finally:
        smp.shutdown()


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("where", [True, "disk"], ids=["host", "disk"])
@pytest.mark.parametrize("name", ["adamw", "fused adamw", "sgd"])
def test_weights_and_state_are_those_without_offloading(
    name: str, where: Any, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 8 << 20)  # parameters are cut, and slots used again and again
    kinds = {
        "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
        "fused adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True),
        "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
    }
    expected, found = trained(False, kinds[name], dtype), trained(where, kinds[name], dtype)
    for what in ("weights", "state"):
        assert len(found[what]) == len(expected[what])
        assert all(torch.equal(one, other) for one, other in zip(found[what], expected[what], strict=True)), what
    nbytes = LAYERS * WIDTH * WIDTH * (8 if "adamw" in name else 4) + (LAYERS * WIDTH * WIDTH * 4 if dtype else 0)
    assert found["offloaded"] >= nbytes
    # The allocator counts blocks, which are a little larger than tensors.
    assert expected["held"] - found["held"] >= 0.95 * nbytes
