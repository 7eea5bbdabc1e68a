"""What a forward changes before it calls a module elsewhere, and puts back afterwards: nothing at its end."""

import contextlib
import copy
import types
from collections.abc import Callable, Iterator

import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, PartitionError, RemoteError
from shardwright.execution.state_order import StateOrder
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state import running
from tests.state.keepers import Counter
from tests.state.running import MODES, SCHEDULES, SIZES, check

SCALE = 1.0
SETTINGS = {"scale": 1.0}
CONFIGURATION = types.SimpleNamespace(scale=1.0)

#: A variable that the code of this file reaches by its Python module.
running.SCALE = 1.0  # type: ignore[attr-defined]

job = job_fixture(2)


class WithSkips(nn.Module):
    """A U-Net that keeps its skips in a list of its own."""

    def __init__(self, width: int, *, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.skips: list[torch.Tensor] = []
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.middle = nn.Linear(width, width)
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.down:
            x = layer(x).tanh()
            self.skips.append(x.detach() if self.detached else x)
        x = self.middle(x).tanh()
        for layer in self.up:
            x = layer(x + self.skips.pop()).tanh()
        return x


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_skips_in_a_list_are_those_of_the_same_microbatch(
    job: Job, schedule: str, detached: bool, mode: str, size: str
) -> None:
    torch.manual_seed(0)
    model = WithSkips(SIZES[size][1], detached=detached)
    check(job, model, {"middle": 1}, {**MODES[mode], "pipeline": schedule}, size)


class PutsBack(nn.Module):
    """Calls a child while something is otherwise."""

    shared: list[torch.Tensor] = []  # noqa: RUF012
    factor = 1.0

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scaling = Scaling()
        self.held = {"scale": 1.0}
        self.numbers = [1.0]
        self.child = nn.Linear(width, width)
        self.own = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _KINDS[self.kind](self, x.tanh())


def _variable(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    global SCALE
    before, SCALE = SCALE, 2 * SCALE
    x = module.child(x).tanh() * SCALE
    SCALE = before
    return x


@contextlib.contextmanager
def _scaled() -> Iterator[None]:
    before = SETTINGS["scale"]
    SETTINGS["scale"] = 2 * before
    try:
        yield
    finally:
        SETTINGS["scale"] = before


def _global_dict(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    with _scaled():
        return module.child(x).tanh() * SETTINGS["scale"]


def _global_object(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    before, CONFIGURATION.scale = CONFIGURATION.scale, 2 * CONFIGURATION.scale
    x = module.child(x).tanh() * CONFIGURATION.scale
    CONFIGURATION.scale = before
    return x


def _dict(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    module.held["x"] = x
    return module.child(x) * module.held.pop("x")


def _list(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    module.numbers.append(2.0)
    x = module.child(x) * sum(module.numbers)
    module.numbers.pop()
    return x


def _training(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    module.own.eval()
    x = module.child(x) * (1 if module.own.training else 3)
    module.own.train()
    return x


def _hook(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    handle = module.own.register_forward_hook(lambda _module, _args, result: result * 3)
    x = module.own(module.child(x))
    handle.remove()
    return module.own(x)


def _class_list(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    module.shared.append(x)
    return module.child(x) * module.shared.pop()


def _class_attribute(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    PutsBack.factor = 2.0
    x = module.child(x).tanh() * module.factor
    PutsBack.factor = 1.0
    return x


def _python_module(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    running.SCALE = 2.0  # type: ignore[attr-defined]
    x = module.child(x).tanh() * running.SCALE  # type: ignore[attr-defined]
    running.SCALE = 1.0  # type: ignore[attr-defined]
    return x


def _pushed(x: torch.Tensor, values: list[torch.Tensor] = []) -> list[torch.Tensor]:  # noqa: B006
    values.append(x)
    return values


def _default(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    values = _pushed(x)
    return module.child(x) * values.pop()


class Scaling:
    """Changes a global variable in its methods."""

    def begin(self) -> None:
        global SCALE
        SCALE *= 2

    def end(self) -> None:
        global SCALE
        SCALE /= 2


def _method(module: PutsBack, x: torch.Tensor) -> torch.Tensor:
    module.scaling.begin()
    x = module.child(x).tanh() * SCALE
    module.scaling.end()
    return x


_KINDS: dict[str, Callable[[PutsBack, torch.Tensor], torch.Tensor]] = {
    "a global variable": _variable,
    "a global dict": _global_dict,
    "a global object": _global_object,
    "an item of a dict": _dict,
    "an item of a list": _list,
    "whether a module trains": _training,
    "a hook": _hook,
    "a list of a class": _class_list,
    "an attribute of a class": _class_attribute,
    "a variable of another Python module": _python_module,
    "a default argument": _default,
    "a global variable, by an object's methods": _method,
}


class Around(nn.Module):
    """Layers before and after a module."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.inner = inner
        self.after = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x)))


@pytest.mark.covering(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_put_back_is_seen_by_its_own_microbatch_alone(job: Job, schedule: str, kind: str, mode: str) -> None:
    torch.manual_seed(0)
    width = SIZES["large"][1]
    model = Around(width, PutsBack(width, kind))
    check(job, model, {"inner.child": 1}, {**MODES[mode], "pipeline": schedule}, "large")
    assert SCALE == SETTINGS["scale"] == CONFIGURATION.scale == 1.0


class FillsLater(nn.Module):
    """Fills and empties a list around a call, but not in the forward that is traced."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.values: list[torch.Tensor] = []
        self.counter = Counter()
        self.child = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counter() > 4:
            self.values.append(x)
            return self.child(x.tanh()) + self.values.pop()
        return self.child(x)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_branch_that_no_trace_took_is_noticed(job: Job, schedule: str) -> None:
    torch.manual_seed(0)
    check(job, FillsLater(160), {"child": 1}, {"pipeline": schedule}, "large")


class Patches(nn.Module):
    """Replaces the forward of a child for one call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own = nn.Dropout(0.0)
        self.child = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.own.forward = lambda x: x * 3
        x = self.own(self.child(x))
        del self.own.forward
        return x


def test_a_forward_that_is_replaced_in_a_forward_is_refused(job: Job) -> None:
    with pytest.raises((FrameError, RemoteError), match="the forward of module 'own' was replaced"):
        check(job, Patches(3), {"child": 1}, {})


class Registers(nn.Module):
    """Registers a hook on a child, in its first or in a later forward."""

    def __init__(self, width: int, call: int, method: str = "register_forward_hook") -> None:
        super().__init__()
        self.call, self.method = call, method
        self.counter = Counter()
        self.child = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counter() == self.call:
            hook = {"register_forward_hook": lambda _module, _args, result: result * 3}.get(
                self.method, lambda *_: None
            )
            getattr(self.child, self.method)(hook)
        return self.child(x)


def test_a_hook_that_the_first_forward_registers_joins_both_modules(job: Job) -> None:
    torch.manual_seed(0)
    check(job, Around(160, Registers(160, call=1)), {"inner": 1, "after": 1}, {}, "large")
    with pytest.raises((PartitionError, RemoteError), match=r"sets inner.child._forward_hooks"):
        check(job, Around(160, Registers(160, call=1)), {"inner": 0, "inner.child": 1}, {}, "large")


@pytest.mark.parametrize(
    "method",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_hook_that_a_later_forward_registers_elsewhere_is_refused(job: Job, method: str) -> None:
    with pytest.raises((FrameError, RemoteError), match=r"a hook was registered on module 'child' .*runs on rank 1"):
        check(job, Registers(160, 6, method), {"child": 1}, {}, "large")


class CountsInTraining(nn.Module):
    """Keeps something in training only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.child = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return self.norm(self.child(x)) * (1 + self.calls)


def test_an_evaluation_first_leaves_training_parallel(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    original = Around(160, CountsInTraining(160)).double()
    batch = torch.randn(160, 160, dtype=torch.float64)

    def main(runtime: Runtime) -> tuple[torch.Tensor, bool]:
        module = copy.deepcopy(original)
        smp.set_partition(module.inner.child, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def evaluate(inputs: torch.Tensor) -> torch.Tensor:
            return model(inputs)

        @smp.step
        def train(inputs: torch.Tensor) -> torch.Tensor:
            loss = model(inputs).square().mean()
            model.backward(loss)
            return loss

        model.eval()
        with torch.no_grad():
            evaluate(batch)
        model.train()
        return train(batch).stack(), runtime[StateOrder].one_at_a_time

    results = job.run(main, {"auto_partition": False, "default_partition": 0, "microbatches": 4})
    expected = torch.stack([copied.square().mean() for copied in map(original, batch.chunk(4))])
    for result in results:
        assert not isinstance(result, BaseException), result
        torch.testing.assert_close(result[0], expected, rtol=1e-10, atol=1e-12)
        assert not result[1]
    assert "run again" not in caplog.text
