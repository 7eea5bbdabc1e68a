"""Whatever type a module keeps its state in, it is as in one process; and a step that fails leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.held import HELD, Slots, bump_slots

job = job_fixture(2)

#: Beyond these, forwards take a branch that is else not taken, and fail.
RARE, FAILING = 50.0, 500.0


class Holder(nn.Module):
    """Counts its forwards in a value of some type; its layer is on another rank."""

    def __init__(self, kind: str, rarely: bool) -> None:
        super().__init__()
        make, self._bump = HELD[kind]
        self._held = make()
        self._rarely = rarely
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = float(x.detach().abs().max())
        if not self._rarely or largest > RARE:
            x = x * (1 + 0.1 * self._bump(self._held))
        if largest > FAILING:
            raise ArithmeticError("the batch is too large")
        return self.inner(x)


def made(kind: str, rarely: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Holder(kind, rarely), nn.Linear(4, 4)).double()


def batches(largest: list[float]) -> list[torch.Tensor]:
    found = []
    for seed, scale in enumerate(largest):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        batch[-1, 0] = scale  # in the last microbatch
        found.append(batch)
    return found


def alone(model: nn.Module, data: list[torch.Tensor], microbatches: int) -> list[dict[str, torch.Tensor]]:
    found = []
    for batch in data:
        model.zero_grad()
        outputs = []
        for part in batch.chunk(microbatches):
            outputs.append(model(part))
            (outputs[-1].square().mean() / microbatches).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"outputs": torch.cat(outputs).detach(), **gradients})
    return found


def step_of(model: smp.DistributedModel) -> Any:
    """A step function that trains a model on the squares of its outputs, and returns them."""

    @smp.step
    def train(part: torch.Tensor) -> torch.Tensor:
        output = model(part)
        model.backward(output.square().mean())
        return output

    return train


def divided(module: nn.Module, rank: int, data: list[torch.Tensor], fails: int | None) -> list[dict[str, Any]]:
    smp.set_partition(module[0], rank)  # type: ignore[index]
    smp.set_partition(module[0].inner, 1 - rank)  # type: ignore[index, union-attr, arg-type]
    model = smp.DistributedModel(module)
    train = step_of(model)
    found = []
    for number, batch in enumerate(data):
        model.zero_grad()
        if number == fails:
            with pytest.raises((ArithmeticError, smp.RemoteError), match="too large"):
                train(batch)
            continue
        outputs = train(batch).concat()
        gradients = {n: p.grad for n, p in module.named_parameters() if not is_sentinel(p) and p.grad is not None}
        found.append({"outputs": outputs, **{name: gradient.clone() for name, gradient in gradients.items()}})
    return found


def check(
    job: Job, kind: str, largest: list[float], *, rank: int, microbatches: int, rarely: bool, fails: int | None = None
) -> None:
    check_model(job, lambda: made(kind, rarely), batches(largest), rank=rank, microbatches=microbatches, fails=fails)


def check_model(
    job: Job,
    make: Callable[[], nn.Module],
    data: list[torch.Tensor],
    *,
    microbatches: int,
    rank: int = 1,
    fails: int | None = None,
) -> None:
    """Compare a model over two ranks with one in one process, which is spared the batch that fails."""
    expected = alone(make(), [batch for number, batch in enumerate(data) if number != fails], microbatches)
    models = [make() for _ in range(2)]

    def main(runtime: Runtime) -> list[dict[str, Any]]:
        return divided(models[runtime.place.rank], rank, data, fails)

    given = {"auto_partition": False, "default_partition": 0, "microbatches": microbatches}
    for result in job.run(main, given):
        if isinstance(result, BaseException):
            raise result
        assert len(result) == len(expected)
        for step, (found, wanted) in enumerate(zip(result, expected, strict=True)):
            for name, value in found.items():
                torch.testing.assert_close(
                    value, wanted[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name, s=step: f"{n} in step {s}: {m}"
                )


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("kind", HELD)
def test_what_a_module_holds_is_as_in_one_process(job: Job, kind: str, microbatches: int) -> None:
    check(job, kind, [1.0] * 3, rank=microbatches % 2, microbatches=microbatches, rarely=False)


@pytest.mark.parametrize("rarely", [False, True], ids=["always written", "rarely written"])
@pytest.mark.parametrize("kind", HELD)
def test_a_step_that_fails_leaves_what_a_module_holds(job: Job, kind: str, rarely: bool) -> None:
    largest = [1.0, 2 * FAILING, 2 * RARE, 2 * RARE]
    check(job, kind, largest, rank=0, microbatches=2, rarely=rarely, fails=1)


@pytest.mark.parametrize("kind", HELD)
def test_a_write_that_no_trace_saw_is_noticed_and_undone(job: Job, kind: str) -> None:
    check(job, kind, [1.0, 1.0, 2 * RARE, 2 * RARE], rank=1, microbatches=2, rarely=True)


class LargeTensor(nn.Module):
    """Writes in a rare branch to a tensor that is too large to be copied before every step."""

    def __init__(self) -> None:
        super().__init__()
        self._table = torch.zeros(1 << 17)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().abs().max()) > RARE:
            self._table.add_(1)
        if float(x.detach().abs().max()) > FAILING:
            raise ArithmeticError("the batch is too large")
        return self.inner(x * (1 + self._table[5]))


def large_steps(module: nn.Module, data: list[torch.Tensor]) -> list[tuple[str, str]]:
    """How steps end on this rank; what could not be put back is put back here."""
    holder: Any = module[0]  # type: ignore[index]
    smp.set_partition(holder, 1)
    model = smp.DistributedModel(module)
    train = step_of(model)
    found = []
    for batch in data:
        try:
            found.append(("", f"{float(train(batch).concat()[0, 0]):.9f}"))
        except (ArithmeticError, smp.ShardwrightError) as error:
            kind = error.kind if isinstance(error, smp.RemoteError) else type(error).__name__
            found.append((kind, str(error)))
            if kind == "PartialUpdateError":
                holder._table.zero_()
                smp.resume_after_failure(error)
    return found


def large_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(LargeTensor(), nn.Linear(4, 4)).double()


@pytest.mark.parametrize(
    ("microbatches", "first", "kind"),
    [(1, 2 * FAILING, "ArithmeticError"), (2, 2 * FAILING, "ArithmeticError"), (2, 2 * RARE, "FrameError")],
)
def test_a_large_tensor_that_cannot_be_put_back_is_named(job: Job, microbatches: int, first: float, kind: str) -> None:
    data = batches([1.0, first, 1.0, 2 * RARE, 2 * FAILING, 2 * RARE])
    whole = large_model()
    wanted = [float(torch.cat([whole(p) for p in data[n].chunk(microbatches)]).detach()[0, 0]) for n in (3, 5)]
    models = [large_model() for _ in range(2)]
    given = {"auto_partition": False, "default_partition": 0, "microbatches": microbatches}
    for result in job.run(lambda runtime: large_steps(models[runtime.place.rank], data), given):
        if isinstance(result, BaseException):
            raise result
        kinds = [one for one, _ in result]
        assert kinds == ["", kind, "PartialUpdateError", "", "ArithmeticError", ""], result
        assert "'0._table'" in result[2][1]
        assert [float(result[n][1]) for n in (3, 5)] == pytest.approx(wanted, abs=1e-8)


class Resized(nn.Module):
    """Resizes a buffer and a tensor in a rare branch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.ones(2))
        self._tensor = torch.ones(2)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().abs().max()) > RARE:
            for tensor in (self.buffer, self._tensor):
                tensor.resize_(len(tensor) + 1).fill_(1)
        return self.inner(x * (self.buffer.sum() + self._tensor.sum()))


def test_a_tensor_that_a_rare_branch_resizes(job: Job) -> None:
    data = batches([1.0, 2 * RARE, 2 * RARE])

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Resized(), nn.Linear(4, 4)).double()

    check_model(job, model, data, microbatches=2)


class Several(nn.Module):
    """Keeps a number in an object, a tensor if it is to, and a large tensor that only a rare branch writes to."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self._object, self._tensor, self._table = Slots(), torch.zeros(2), torch.zeros(1 << 17)
        self._writes = writes
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._writes:
            self._tensor.add_(1)
        if float(x.detach().abs().max()) > RARE:
            self._table.add_(1)
        return self.inner(x * (1 + bump_slots(self._object) + self._tensor[0] + self._table[5]))


@pytest.mark.parametrize(("writes", "again"), [(True, 0), (False, 1)])
def test_a_module_that_keeps_an_object_and_tensors(job: Job, writes: bool, again: int) -> None:
    """Where it is known to write to tensors, microbatches keep its order anyway; else the step is run again."""
    data = batches([1.0, 2 * RARE, 2 * RARE])

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Several(writes=writes), nn.Linear(4, 4)).double()

    before = job.runtimes[0].step.number
    check_model(job, model, data, microbatches=2)
    assert job.runtimes[0].step.number - before == len(data) + again
