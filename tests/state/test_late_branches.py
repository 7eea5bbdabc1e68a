"""What modules change in a branch that no trace took: first in a later step, while microbatches take turns."""

import array
import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.keepers import Counter
from tests.state.running import SCHEDULES, SIZES, check

WIDTH = SIZES["small"][1]

job = job_fixture(2)


class Late(nn.Module):
    """Has a forward of its own once the first step is over; another rank computes `child`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.counter = Counter()
        self.current: torch.Tensor | None = None
        self.skips: list[torch.Tensor] = []
        self.settings = types.SimpleNamespace(factor=1.0)
        self.numbers = (bytearray(b"\1"), array.array("d", [1.0]), {1.0}, collections.deque([1.0]))
        self.named: dict[str, Any] = {"factor": 1.0}
        self.before = nn.Linear(WIDTH, WIDTH)
        self.child = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Dropout(0.0)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x).tanh()
        x = KINDS[self.kind](self, x) if self.counter() > 4 else self.child(x)
        return self.after(x.tanh())


def _deleted(module: Late, x: torch.Tensor) -> torch.Tensor:
    module.kept_meanwhile = x
    x = module.child(x) * module.kept_meanwhile
    del module.kept_meanwhile
    return x


def _nothing(module: Late, x: torch.Tensor) -> torch.Tensor:
    module.current = x
    x = module.child(x) * module.current
    module.current = None
    return x


def _new_list(module: Late, x: torch.Tensor) -> torch.Tensor:
    module.skips = [x]
    return module.child(x) * module.skips.pop()


def _in_a_list(module: Late, x: torch.Tensor) -> torch.Tensor:
    module.skips.append(x)
    x = module.before(x).tanh()
    return module.child(x) * module.skips.pop()


def _evaluates(module: Late, x: torch.Tensor) -> torch.Tensor:
    module.own.eval()
    x = module.child(x) * (1 if module.own.training else 3)
    module.own.train()
    return x


def _training_is_set(module: Late, x: torch.Tensor) -> torch.Tensor:
    x = x * (3 if module.own.training else 1)
    module.own.training = not module.own.training
    return module.child(x)


def _hook(module: Late, x: torch.Tensor) -> torch.Tensor:
    handle = module.own.register_forward_hook(lambda _module, _args, result: result * 3)
    x = module.own(module.child(x))
    handle.remove()
    return module.own(x)


def _pre_hook(module: Late, x: torch.Tensor) -> torch.Tensor:
    handle = module.own.register_forward_pre_hook(lambda _module, args: (args[0] * 3,))
    x = module.own(module.child(x))
    handle.remove()
    return module.own(x)


def _in_an_object(module: Late, x: torch.Tensor) -> torch.Tensor:
    module.settings.factor = x
    x = module.child(x) * module.settings.factor
    module.settings.factor = 1.0
    return x


def _another_item(module: Late, x: torch.Tensor) -> torch.Tensor:
    module.named["factor"] = x
    x = module.child(x) * module.named["factor"]
    module.named["factor"] = 1.0
    return x


def _exchanges(place: int) -> Callable[[Late, torch.Tensor], torch.Tensor]:
    def forward(module: Late, x: torch.Tensor) -> torch.Tensor:
        held: Any = module.numbers[place]
        before, value = next(iter(held)), 2 + int(20 * abs(float(x.detach()[0, 0])))
        if isinstance(held, set):
            held.clear()
            held.add(value)
        else:
            held[0] = value
        x = module.child(x) * next(iter(held))
        if isinstance(held, set):
            held.clear()
            held.add(before)
        else:
            held[0] = before
        return x

    return forward


def _another_class(module: Late, x: torch.Tensor) -> torch.Tensor:
    module.own.__class__ = nn.Tanh if float(x.detach().sum()) > 0 else nn.Sigmoid
    x = module.own(module.child(x))
    module.own.__class__ = nn.Dropout
    return x


KINDS: dict[str, Callable[[Late, torch.Tensor], torch.Tensor]] = {
    "an attribute that is deleted": _deleted,
    "an attribute that is None again": _nothing,
    "a new list": _new_list,
    "an item of a list": _in_a_list,
    "whether a module trains": _evaluates,
    "whether a module trains, for good": _training_is_set,
    "an attribute of an object": _in_an_object,
    "another item in a dict": _another_item,
    "an item of a bytearray": _exchanges(0),
    "an item of an array": _exchanges(1),
    "an item of a set": _exchanges(2),
    "an item of a deque": _exchanges(3),
    "the class of a module": _another_class,
    "a hook": _hook,
    "a hook before": _pre_hook,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_later_branch_computes_as_in_one_process(job: Job, schedule: str, kind: str) -> None:
    torch.manual_seed(0)
    check(job, Late(kind), {"child": 1}, {"pipeline": schedule})


class AnotherClass(nn.Module):
    """Has another class while another rank computes, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _another_class(self, x)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_class_that_is_exchanged_in_every_forward(job: Job, schedule: str) -> None:
    torch.manual_seed(0)
    check(job, AnotherClass(), {"child": 1}, {"pipeline": schedule})


class Fails(nn.Module):
    """Raises an error of its own in a later branch, whatever the order of microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.current: torch.Tensor | None = None
        self.on = False
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.child(x)
        if self.on:
            self.current = x
            raise KeyError("the script's own")
        return x


def test_an_error_that_comes_in_every_order_is_the_scripts_own(job: Job) -> None:
    def main(runtime: Runtime) -> int:
        module = Fails()
        smp.set_partition(module.child, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> None:
            model.backward(model(part).square().mean())

        train(torch.ones(8, WIDTH))
        first = runtime.step.number
        model.on = True
        with pytest.raises(KeyError if runtime.place.rank == 0 else RemoteError, match="the script's own"):
            train(torch.ones(8, WIDTH))
        assert module.current is None
        return runtime.step.number - first

    settings = {"auto_partition": False, "default_partition": 0, "microbatches": 4}
    assert job.run(main, settings) == [2, 2]  # the second time, one microbatch after another


class Switches(nn.Module):
    """Evaluates a part of itself around a call, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Dropout(0.0)
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.own.eval()
        handle = self.own.register_forward_hook(lambda _module, _args, result: result * 3)
        x = self.own(self.child(x))
        handle.remove()
        self.own.train()
        return x


@pytest.mark.parametrize("model", [Switches, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))])
def test_the_mode_of_a_model_is_free_between_steps_and_what_the_trace_saw_change_within(
    job: Job, model: Callable[[], nn.Module]
) -> None:
    def main(runtime: Runtime) -> int:
        module = model()
        smp.set_partition(module.get_submodule("child" if isinstance(module, Switches) else "1"), 1)
        divided = smp.DistributedModel(module)

        @smp.step
        def run(part: torch.Tensor) -> torch.Tensor:
            return divided(part)

        first = runtime.step.number
        with torch.no_grad():
            for mode in (True, False, True, True):
                module.train(mode)
                kept = divided.placement.kept
                assert kept is None or not kept._watch.is_stale
                run(torch.ones(8, WIDTH))
        return runtime.step.number - first

    settings = {"auto_partition": False, "default_partition": 0, "microbatches": 4}
    assert job.run(main, settings) == [4, 4]


class Reader(nn.Module):
    """Uses what its parent holds too."""

    def __init__(self, settings: types.SimpleNamespace, factors: list[float], named: dict[str, float]) -> None:
        super().__init__()
        self.shared = (settings, factors)
        self.named = named
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        settings, factors = self.shared
        return self.layer(x).tanh() * settings.scale * (len(factors) + 1) * self.named.get("scale", 1.0)


class Shares(nn.Module):
    """Changes in a later branch what a module on another rank reads, or something of its own like it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.settings = types.SimpleNamespace(scale=1.0, inner=types.SimpleNamespace(scale=1.0))
        self.own = types.SimpleNamespace(scale=1.0)
        self.factors: list[float] = []
        self.named: dict[str, float] = {}
        self.counter = Counter()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.reader = Reader(self.settings, self.factors, self.named)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.counter() > 4:
            _SHARED[self.kind](self)
        x = self.reader(x) * self.own.scale
        if self.kind.endswith("put back"):
            self.settings.scale = 1.0
        return x


def _scales(module: Shares) -> None:
    module.settings.scale *= 1.5


def _scales_inside(module: Shares) -> None:
    module.settings.inner.scale *= 1.5


def _puts_back(module: Shares) -> None:
    module.settings.scale = 3.0


def _appends(module: Shares) -> None:
    module.factors.append(1.5)


def _names(module: Shares) -> None:
    module.named["scale"] = 1.5


def _scales_its_own(module: Shares) -> None:
    module.own.scale *= 1.5


_SHARED: dict[str, Callable[[Shares], None]] = {
    "an attribute of an object": _scales,
    "an attribute of an object in it": _scales_inside,
    "an attribute of an object that is put back": _puts_back,
    "a list": _appends,
    "a dict": _names,
    "its own": _scales_its_own,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", _SHARED)
def test_a_change_of_what_another_rank_has_a_copy_of_is_refused(job: Job, kind: str, schedule: str) -> None:
    torch.manual_seed(0)
    if kind == "its own":
        check(job, Shares(kind), {"reader": 1}, {"pipeline": schedule})
        return
    with pytest.raises((FrameError, RemoteError), match=r"also what 'reader\.(shared|named)' holds.*runs on rank 1"):
        check(job, Shares(kind), {"reader": 1}, {"pipeline": schedule})
    check(job, Shares(kind), {}, {"pipeline": schedule})
