"""The order of microbatches at what modules keep: loops, several visits, branches, backwards, containers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.execution.state_order import StateOrder
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.frames.job import Job, job_fixture
from tests.state.keepers import AverageInTwoOperations, Keeper, PythonAverage, PythonCounter
from tests.state.running import MODES, SCHEDULES, SIZES, STEPS, check

job = job_fixture(3)


class DataDependentLoop(nn.Module):
    """A child that is called as often as data says, and then a batch normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.child = nn.Linear(width, width)
        nn.init.normal_(self.child.weight, std=0.7 / width**0.5)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1 + 40 * (x[0, 0] > 0))
        calls = 0
        while x.abs().mean() > 0.3 and calls < 12:
            x, calls = self.child(x), calls + 1
        return self.norm(x)


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [0, 1, 2])
def test_a_module_behind_a_loop_that_depends_on_data(job: Job, norm: int, mode: str, size: str) -> None:
    torch.manual_seed(3)
    model = DataDependentLoop(SIZES[size][1])
    check(job, model, {"child": 1, "norm": norm}, MODES[mode], size)


class KeeperInLoop(nn.Module):
    """A module that keeps something, called as often as data says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.keeper = AverageInTwoOperations(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + int(x[0, 0].abs() * 3) % 3):
            x = self.keeper(x)
        return x


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_module_that_is_called_as_often_as_data_says(job: Job, schedule: str, mode: str) -> None:
    torch.manual_seed(3)
    check(job, KeeperInLoop(SIZES["large"][1]), {"keeper": 1}, {**MODES[mode], "pipeline": schedule}, "large")


class Visits(nn.Module):
    """Modules of several ranks that keep something, some of them visited twice, one around others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = AverageInTwoOperations(width)
        self.twice = PythonAverage(width)
        self.outer = Outer(width)
        self.last = PythonCounter(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.first(x))
        x = self.outer(x)
        return self.last(self.twice(x))


class Outer(nn.Module):
    """A module that keeps something around a child that does so too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.inner = AverageInTwoOperations(width)
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.before(x))
        with torch.no_grad():
            self.level.mul_(0.5)
            self.level.add_(x.abs().mean())
        return x / self.level.clone()


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("schedule", "active"), [("simple", 4), *((name, active) for name in SCHEDULES[1:] for active in (1, 2, 4))]
)
def test_modules_that_are_visited_twice_and_lie_in_one_another(job: Job, active: int, schedule: str, mode: str) -> None:
    torch.manual_seed(3)
    ranks = {"first": 1, "twice": 2, "outer": 0, "last": 1}
    settings = {**MODES[mode], "pipeline": schedule, "active_microbatches": active}
    check(job, Visits(SIZES["large"][1]), ranks, settings, "large")


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_function_that_calls_its_model_twice_is_run_again_once(job: Job, schedule: str, mode: str) -> None:
    torch.manual_seed(3)
    settings = {**MODES[mode], "pipeline": schedule}
    model = Chain(SIZES["large"][1], AverageInTwoOperations)
    before = job.runtimes[0].step.number
    check(job, model, {"first": 1, "keeper": 0, "last": 2}, settings, "large", calls=2)
    # The first step shows how often microbatches come; no later one is run again for that.
    assert job.runtimes[0].step.number - before == STEPS + 1
    assert not job.runtimes[0][StateOrder].one_at_a_time


class Around(nn.Module):
    """Keeps something around children that may be elsewhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.calls = 0
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        before = self.average * 0.5
        x = self.second(torch.tanh(self.first(x)))
        self.average = before + x.detach().mean(0)
        return x / self.calls + self.average


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [{"first": 1, "second": 2}, {"first": 1}, {"second": 1}])
def test_what_is_kept_around_calls_of_other_ranks(job: Job, ranks: dict[str, int], mode: str, size: str) -> None:
    torch.manual_seed(3)
    check(job, Around(SIZES[size][1]), ranks, MODES[mode], size)


LISTED = [(m, phase) for phase in ("forward", "backward") for m in range(4)]
PROGRAM = """shardwright program 1
rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
rank 1: 1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
rank 2: 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
"""


@pytest.mark.parametrize("kind", ["list", "program"])
@pytest.mark.parametrize("model", [Around, lambda width: Chain(width, AverageInTwoOperations)])
def test_under_a_list_and_under_a_program(job: Job, model: Any, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    file = tmp_path / "schedule.txt"
    file.write_text(PROGRAM)
    pipeline = LISTED if kind == "list" else str(file)
    made = model(SIZES["large"][1])
    ranks = {"first": 1, "second": 2} if isinstance(made, Around) else {"first": 1, "keeper": 2}
    check(job, made, ranks, {"pipeline": pipeline}, "large")


class Late(Keeper):
    """Writes in a branch that is first taken after some steps."""

    def keep(self, width: int) -> None:
        self.threshold = 60.0
        self.late = 0.0
        self.past: list[float] = []
        self.register_buffer("average", torch.zeros(width))

    def write(self, x: torch.Tensor) -> None:
        """What the branch does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(x)
        if float(x.detach().abs().max()) > self.threshold:
            self.write(y.detach())
        return y * (1 + self.late) + self.average + sum(self.past)


class LateNumber(Late):
    """A number."""

    def write(self, x: torch.Tensor) -> None:
        self.late = 0.5 * self.late + float(x.mean())


class LateList(Late):
    """A list."""

    def write(self, x: torch.Tensor) -> None:
        self.past.append(float(x.mean()))


class LateBuffer(Late):
    """A buffer."""

    def write(self, x: torch.Tensor) -> None:
        self.average.mul_(0.5)
        self.average.add_(x.mean(0))


class Scaled(nn.Module):
    """The first microbatch of the third step is larger than all others."""

    def __init__(self, width: int, keeper: type[Late]) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.keeper = keeper(width)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1000.0 if float(x[0, 0]) > 1.0 else 1.0
        return self.last(self.keeper(self.first(x) * scale))


@pytest.mark.covering(2)
@pytest.mark.parametrize("keeper", [LateNumber, LateList, LateBuffer])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_write_that_no_trace_saw_is_noticed(job: Job, rank: int, mode: str, keeper: type[Late]) -> None:
    torch.manual_seed(8)
    check(job, Scaled(SIZES["large"][1], keeper), {"first": 2, "keeper": rank}, MODES[mode], "large", steps=5)


class ShrunkWeight(Keeper):
    """Each forward changes the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return self.scaled(x)


class NormalisedWeight(Keeper):
    """Each forward exchanges what is in the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(x)
        self.weight.data = self.weight.data * 0.5 + 1 / (1 + y.detach().abs().mean(0))
        return y


@pytest.mark.covering(2)
@pytest.mark.parametrize("places", [{"first": 1, "keeper": 0, "last": 1}, {"first": 0, "keeper": 1, "last": 2}])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keeper", [ShrunkWeight, NormalisedWeight])
def test_weights_that_forwards_change(job: Job, keeper: Any, mode: str, size: str, places: dict[str, int]) -> None:
    torch.manual_seed(5)
    check(job, Chain(SIZES[size][1], keeper), places, MODES[mode], size)


class ReturnsCount(Keeper):
    """Returns the buffer itself, at which its caller looks after it has waited for another rank."""

    def keep(self, width: int) -> None:
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.scaled(x)
        with torch.no_grad():
            self.count.mul_(0.5)
            self.count.add_(y.abs().mean())
        return y, self.count


class LooksLate(nn.Module):
    """Calls such a module, then another rank, and only then looks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.keeper = ReturnsCount(width)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, count = self.keeper(self.first(x))
        y = self.last(y)
        return y * (1 + float(y.detach().abs().mean())) * count.clone()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_buffer_that_is_returned_and_looked_at_later(job: Job, schedule: str, mode: str, size: str) -> None:
    torch.manual_seed(5)
    settings = {**MODES[mode], "pipeline": schedule}
    check(job, LooksLate(SIZES[size][1]), {"first": 1, "keeper": 0, "last": 1}, settings, size)
    assert all(runtime[StateOrder].one_at_a_time for runtime in job.runtimes)


class LateWeight(Late):
    """A weight that no backward needs the values of."""

    def keep(self, width: int) -> None:
        super().keep(width)
        self.shift = nn.Parameter(torch.ones(width))

    def write(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.shift.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift


@pytest.mark.parametrize("rank", [0, 1])
def test_a_write_to_a_weight_that_no_trace_saw_is_refused(job: Job, rank: int) -> None:
    torch.manual_seed(8)
    with pytest.raises((FrameError, RemoteError), match=r"parameter 'keeper\.shift' was written to in a forward"):
        check(job, Scaled(SIZES["large"][1], LateWeight), {"first": 2, "keeper": rank}, {}, "large", steps=5)


class GradientKeeper(Keeper):
    """A hook in the backward writes what the next forward reads."""

    def keep(self, width: int) -> None:
        self.level = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(x) * self.level
        if y.requires_grad:
            y.register_hook(self.note)
        return y

    def note(self, gradient: torch.Tensor) -> None:
        self.level = 0.5 * self.level + float(gradient.abs().sum())


class GradientBuffer(GradientKeeper):
    """The same with a buffer."""

    def keep(self, width: int) -> None:
        self.register_buffer("level", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(x) * self.level.clone()
        if y.requires_grad:
            y.register_hook(self.note)
        return y

    def note(self, gradient: torch.Tensor) -> None:
        self.level.mul_(0.5).add_(gradient.abs().sum())


class Recomputed(Keeper):
    """A batch normalisation that is computed again in the backward."""

    def keep(self, width: int) -> None:
        self.norm = nn.BatchNorm1d(width, momentum=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda z: self.norm(self.scaled(z)), x, use_reentrant=False)


class Chain(nn.Module):
    """A module that keeps something, between two layers."""

    def __init__(self, width: int, keeper: Any) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.keeper = keeper(width)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.keeper(self.first(x)))


@pytest.mark.covering(2)
@pytest.mark.parametrize("keeper", [GradientKeeper, GradientBuffer, Recomputed])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("places", [{"first": 1, "keeper": 0, "last": 1}, {"first": 0, "keeper": 1, "last": 2}])
def test_what_a_backward_writes_is_there_for_the_next_forward(
    job: Job, places: dict[str, int], size: str, mode: str, keeper: Any
) -> None:
    torch.manual_seed(5)
    check(job, Chain(SIZES[size][1], keeper), places, MODES[mode], size)
