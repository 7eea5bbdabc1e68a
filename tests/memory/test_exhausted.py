"""An error that memory ran out comes with the account of the rank, and with what would help."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import shardwright as smp
import torch
import torch.distributed as dist
from shardwright.errors import OffloadError, ShardwrightError
from shardwright.execution import serve
from shardwright.memory.exhausted import is_out_of_memory
from shardwright.values import pack
from torch import nn

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


class Greedy(nn.Module):
    """A linear layer that allocates more than any machine has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wants = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wants:
            torch.empty(self.wants, dtype=torch.uint8)
        result: torch.Tensor = self.linear(x)
        return result


def test_the_rank_that_ran_out_says_so_on_every_rank(job: Job) -> None:
    nets = [nn.Sequential(nn.Linear(4, 4), Greedy()) for _ in range(2)]

    def main(runtime: Any) -> str:
        net = nets[runtime.place.rank]
        smp.set_partition(net[1], 1)
        model = smp.DistributedModel(net)

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x).sum())

        train(torch.ones(4, 4))
        net[1].wants = 1 << 56
        try:
            train(torch.ones(4, 4))
        except Exception as error:
            return "\n".join([str(error), *getattr(error, "__notes__", [])])
        return "no error"

    given = {"auto_partition": False, "default_partition": 0, "microbatches": 4, "pipeline": "simple"}
    for text in job.run(main, given):
        assert "can't allocate memory" in text
        assert "Memory of rank 1" in text
        assert "predicted" in text
        assert "activations" in text
        assert '"pipeline_parallel_degree": 4' in text, text


class Exhausting(torch.autograd.Function):
    """The identity, in whose forward or backward a device runs out of memory once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _run_out("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        _run_out("backward")
        return gradients[0]


#: Where a device runs out of memory the next time; not in a module, whose state is put back after a failed step.
WANTED: set[str] = set()


def _run_out(here: str) -> None:
    if here in WANTED:
        WANTED.remove(here)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Activations(nn.Module):
    """A layer with a tensor of its own that is alive when the device runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.linear(x)
        ALIVE.add(held)
        result: torch.Tensor = Exhausting.apply(held)  # type: ignore[no-untyped-call]
        return result


ALIVE: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()


@pytest.mark.parametrize("where", ["forward", "backward", "sending"])
def test_a_device_that_ran_out_is_named_on_every_rank_and_the_next_step_works(
    job: Job, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), Activations())
    nets = [nn.Sequential(copy.deepcopy(plain[0]), Activations()) for _ in range(2)]
    for net in nets:
        net.load_state_dict(plain.state_dict())
    batch = torch.randn(4, 4)
    plain(batch).square().mean().backward()

    def staged(*given: Any) -> Any:
        _run_out("sending")
        return pack(*given)

    monkeypatch.setattr(serve, "pack", staged)

    def main(runtime: Any) -> tuple[str, torch.Tensor | None]:
        net = nets[runtime.place.rank]
        smp.set_partition(net[1], 1)
        model = smp.DistributedModel(net)

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x).square().mean())

        train(batch)
        WANTED.add(where)
        model.zero_grad()
        text = "no error"
        try:
            train(batch)
        except Exception as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        if runtime.place.rank == 1:  # where they were; the other rank may look before this one has unwound
            gc.collect()
            text += f"\nalive: {len(ALIVE)}"
        train(batch)
        return text, net[0].weight.grad if runtime.place.rank == 0 else net[1].linear.weight.grad

    given = {"auto_partition": False, "default_partition": 0, "microbatches": 1}
    found = job.run(main, given)
    for result, expected in zip(found, (plain[0].weight.grad, plain[1].linear.weight.grad), strict=True):
        assert isinstance(result, tuple), result
        assert "CUDA out of memory" in result[0]
        assert "Memory of rank 1" in result[0]
        assert torch.equal(result[1], expected)
    assert "alive: 0" in found[1][0], "the error, or whoever kept it, holds the tensors of the failed step"


def test_a_model_that_does_not_fit_on_the_device_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(4, 4)

    def moved(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(net, "to", moved)
    smp.init()
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            smp.DistributedModel(net)
        assert any("Memory of rank 0" in note for note in caught.value.__notes__)
    finally:
        smp.shutdown()


def test_one_rank_explains_its_own_error() -> None:
    smp.init(microbatches=2)
    try:
        net = Greedy()
        model = smp.DistributedModel(net)

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x).sum())

        train(torch.ones(4, 4))
        net.wants = 1 << 56
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            train(torch.ones(4, 4))
        assert sum("Memory of rank 0" in note for note in caught.value.__notes__) == 1
    finally:
        smp.shutdown()


def test_an_update_that_runs_out_is_explained() -> None:
    class Greediest(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            torch.empty(1 << 56, dtype=torch.uint8)

    smp.init()
    try:
        model = smp.DistributedModel(nn.Linear(4, 4))
        optimizer = smp.DistributedOptimizer(Greediest(model.parameters(), lr=0.1))
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            optimizer.step()
        assert any("Memory of rank 0" in note for note in caught.value.__notes__)
    finally:
        smp.shutdown()


def test_other_errors_are_let_alone() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(dist.DistBackendError("NCCL error: Failed to CUDA calloc 6291456 bytes: out of memory"))
    assert is_out_of_memory(ShardwrightError("allocating 1048576 bytes: CUDA_ERROR_OUT_OF_MEMORY"))
    assert not is_out_of_memory(OffloadError("out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("out of memory"))
