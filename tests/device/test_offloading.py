"""Offloading on a CUDA device: exact results, device memory that falls, locked memory that is used again."""

from __future__ import annotations

from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import current_runtime
from shardwright.offloading import OffloadedActivations
from shardwright.offloading.streams import CudaStreams
from torch import nn

pytestmark = pytest.mark.gpu

WIDTH, ROWS, BLOCKS, MICROBATCHES = 512, 1024, 12, 4
WHERE = [False, True, "disk"]


class Block(nn.Module):
    """A layer that writes to its argument, also while it is being copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.mul_(0.5)
        return y + self.outer(torch.tanh(self.inner(y)))


@smp.step
def train(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss.detach()


def run(where: bool | str, horizon: int = 2, steps: int = 3) -> dict[str, Any]:
    """Train, and return losses, gradients, the most device memory of the last step and counts."""
    keys = {"microbatches": MICROBATCHES, "pipeline": "simple", "activation_loading_horizon": horizon}
    smp.init(keys | {"offload_activations": where})
    try:
        torch.manual_seed(3)
        module = nn.Sequential(*(Block() for _ in range(BLOCKS))).double().cuda()
        model: Any = smp.DistributedModel(module)
        smp.set_activation_checkpointing(module)
        found: dict[str, Any] = {"losses": [], "locked": []}
        for step in range(steps):
            for parameter in module.parameters():
                parameter.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(MICROBATCHES * ROWS, WIDTH, dtype=torch.float64, generator=generator).cuda()
            found["losses"].append(train(model, x).stack().cpu())
            found["peak"] = torch.cuda.max_memory_allocated() - before
            if where:
                found["counts"] = current_runtime()[OffloadedActivations].counts()
                found["locked"].append(found["counts"]["locked_bytes"])
        found["gradients"] = [p.grad.cpu() for p in module.parameters() if p.grad is not None]
        return found
    finally:
        smp.shutdown()


@pytest.mark.parametrize("horizon", [1, 4])
@pytest.mark.parametrize("where", [True, "disk"], ids=["host", "disk"])
def test_losses_and_gradients_are_those_without_offloading(where: bool | str, horizon: int) -> None:
    expected, found = run(False), run(where, horizon)
    assert len(found["gradients"]) == 4 * BLOCKS
    for name in ("losses", "gradients"):
        assert all(torch.equal(left, right) for left, right in zip(expected[name], found[name], strict=True))
    assert found["counts"]["stored"] > 0
    assert found["counts"]["loaded"] > 0


@pytest.mark.parametrize("where", [True, "disk"], ids=["host", "disk"])
def test_the_peak_of_device_memory_falls(where: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.offloading.device.MOST_LEAVING_BYTES", 8 << 20)
    expected, found = run(False), run(where)
    # One block's argument takes 4 MiB; of a microbatch all but those within the horizon leave.
    assert expected["peak"] - found["peak"] > 2 * BLOCKS * (4 << 20)


def test_locked_memory_is_used_again_in_every_step() -> None:
    locked = run(True, steps=6)["locked"]
    assert locked[0] > 0
    # At most what one step keeps, and what copies of its end still read. How much that is depends on their speed.
    kept = MICROBATCHES * BLOCKS * ROWS * WIDTH * 8
    assert max(locked) <= 1.2 * kept
    assert locked[-1] <= 1.2 * locked[0]


def test_memory_is_not_used_again_before_its_copy_out_is_done() -> None:
    streams, into = CudaStreams(), torch.empty(1 << 24, dtype=torch.uint8, pin_memory=True)
    device = torch.device("cuda", torch.cuda.current_device())
    for fill in range(20):
        source = torch.full((1 << 24,), fill, dtype=torch.uint8, device=device)
        torch.cuda._sleep(5_000_000)
        done = streams.copy_out(source, into, streams.computed(device))
        del source
        torch.full((1 << 24,), 255, dtype=torch.uint8, device=device)  # takes the memory, if it may
        done.synchronize()
        assert into.eq(fill).all()


def test_a_copy_back_does_not_wait_for_copies_that_wait_for_a_computation() -> None:
    streams, into = CudaStreams(), torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.full((1 << 20,), 7, dtype=torch.uint8, pin_memory=True)
    leaving = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    warm, done = streams.copy_back(source, device)  # streams and memory are made before it counts
    done.synchronize()
    assert warm.numel() == 1 << 20
    torch.cuda._sleep(2_000_000_000)  # about a second
    computed = streams.computed(device)
    left = streams.copy_out(leaving, into, computed)
    tensor, done = streams.copy_back(source, device)
    done.synchronize()
    assert not computed.query(), "it waited for the computation"
    left.synchronize()
    assert into.eq(0).all()
    assert tensor.eq(7).all()


def test_a_computation_waits_for_its_copy_back_and_no_longer() -> None:
    streams = CudaStreams()
    device = torch.device("cuda", torch.cuda.current_device())
    for fill in range(20):
        source = torch.full((1 << 24,), fill, dtype=torch.uint8, pin_memory=True)
        tensor, done = streams.copy_back(source, device)
        streams.use(tensor, done)
        result = tensor.eq(fill).all()
        del tensor  # its memory belongs to the copy stream, which may not have it before the comparison is done
        streams.copy_back(torch.full((1 << 24,), 255, dtype=torch.uint8, pin_memory=True), device)
        assert result.item()
        done.synchronize()
