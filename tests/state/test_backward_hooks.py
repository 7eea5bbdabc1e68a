"""What a backward hook of a module changes that the forward of another one, or a hook of it, uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, PartitionError, RemoteError
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.running import MODES, SCHEDULES, SIZES, check

LEVELS: dict[int, float] = {}

job = job_fixture(2)


class Box:
    """An object that modules share."""

    def __init__(self) -> None:
        self.level = 1.0


class Hooked(nn.Module):
    """Has a backward hook on `child`, which changes something that another module uses."""

    def __init__(self, width: int, kind: str, register: str) -> None:
        super().__init__()
        self.made_of = (width, kind, register)
        self.before, self.child, self.after = (nn.Linear(width, width) for _ in range(3))
        self.last = nn.Linear(width, width)
        self.level, self.levels, self.box = 1.0, {"level": 1.0}, Box()
        self._scale: Callable[[], float | torch.Tensor] = lambda: 1.0
        getattr(self.child, f"register_full_backward{register}hook")(KINDS[kind](self))

    def __deepcopy__(self, memo: Any) -> Hooked:
        """Functions that enclose something are not copied."""
        copied = Hooked(*self.made_of).to(self.before.weight.dtype)
        copied.load_state_dict(self.state_dict())
        return copied

    def note(self, *args: Any) -> None:
        self.level = changed(self.level, args[-1])

    def note_in_a_dict(self, *args: Any) -> None:
        self.levels["level"] = changed(self.levels["level"], args[-1])

    def note_in_an_object(self, *args: Any) -> None:
        self.box.level = changed(self.box.level, args[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.child(self.before(x).tanh())
        x = self.after(x / (self.level * self.levels["level"] * self.box.level * self._scale()))
        return self.last(x)


def changed(level: float, gradients: tuple[torch.Tensor, ...]) -> float:
    return 0.5 * level + min(1.0, float(gradients[0].norm()))


def _of_its_sibling(module: Hooked) -> Callable[..., None]:
    module.after.level = 1.0
    module.after.register_forward_hook(lambda own, _args, result: result * own.level)

    def hook(*args: Any) -> None:
        setattr(module.after, "level", changed(module.after.level, args[-1]))  # noqa: B010

    return hook


def _of_its_own(module: Hooked) -> Callable[..., None]:
    child: Any = module.child
    child.level = 1.0
    module._scale = lambda: child.level

    def hook(own: Any, *args: Any) -> None:
        own.level = changed(own.level, args[-1])

    return hook


def _in_a_dict_of_its_own(module: Hooked) -> Callable[..., None]:
    child: Any = module.child
    child.levels = {"level": 1.0}
    module._scale = lambda: child.levels["level"]

    def hook(own: Any, *args: Any) -> None:
        own.levels["level"] = changed(own.levels["level"], args[-1])

    return hook


def _in_a_buffer(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[Hooked], Callable[..., None]]:
    def kind(module: Hooked) -> Callable[..., None]:
        module.register_buffer("scale", torch.ones(module.made_of[0], dtype=torch.float64))
        module._scale = lambda: module.get_buffer("scale").clone()
        return lambda *args: write(module.get_buffer("scale"), args[-1][0])

    return kind


def _in_an_enclosed_buffer(module: Hooked) -> Callable[..., None]:
    scale = torch.ones(module.made_of[0], dtype=torch.float64)
    module.register_buffer("scale", scale)
    module._scale = lambda: module.get_buffer("scale").clone()

    def hook(*args: Any) -> None:
        scale.data[:] = average(args[-1][0])

    return hook


def average(gradient: torch.Tensor) -> torch.Tensor:
    return 1 + 50 * gradient.mean(0).abs()


def _write(scale: torch.Tensor, gradient: torch.Tensor) -> None:
    with torch.no_grad():
        scale.mul_(0.5).add_(average(gradient))


def _write_past_its_version(scale: torch.Tensor, gradient: torch.Tensor) -> None:
    scale.data.copy_(average(gradient))


def _exchange(scale: torch.Tensor, gradient: torch.Tensor) -> None:
    scale.data = average(gradient)


def _enclosed_list(module: Hooked) -> Callable[..., None]:
    levels: list[float] = []
    module._scale = lambda: 1.0 + sum(levels)
    return lambda *args: levels.append(changed(0.0, args[-1]))


def _enclosed_number(module: Hooked) -> Callable[..., None]:
    level = 1.0

    def hook(*args: Any) -> None:
        nonlocal level
        level = changed(level, args[-1])

    module._scale = lambda: level
    return hook


def _global_dict(module: Hooked) -> Callable[..., None]:
    number = id(module)
    LEVELS.pop(number, None)  # of a module that is gone

    def hook(*args: Any) -> None:
        LEVELS[number] = changed(LEVELS.get(number, 1.0), args[-1])

    module._scale = lambda: LEVELS.get(number, 1.0)
    return hook


KINDS: dict[str, Callable[[Hooked], Callable[..., None]]] = {
    "an attribute": lambda module: module.note,
    "an attribute of its sibling": _of_its_sibling,
    "an attribute of its own module": _of_its_own,
    "a dict of its own module": _in_a_dict_of_its_own,
    "a buffer": _in_a_buffer(_write),
    "a buffer, past its version": _in_a_buffer(_write_past_its_version),
    "a buffer, whose values are exchanged": _in_a_buffer(_exchange),
    "an enclosed buffer, past its version": _in_an_enclosed_buffer,
    "a dict": lambda module: module.note_in_a_dict,
    "an object": lambda module: module.note_in_an_object,
    "an enclosed list": _enclosed_list,
    "an enclosed number": _enclosed_number,
    "a global dict": _global_dict,
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("register", ["_", "_pre_"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_backward_hook_changes_is_there_for_the_next_forward(
    job: Job, kind: str, schedule: str, mode: str, register: str, size: str
) -> None:
    torch.manual_seed(0)
    model = Hooked(SIZES[size][1], kind, register)
    settings = {**MODES[mode], "pipeline": schedule}
    found = check(job, model, {"before": 0, "child": 1}, settings, size, joined=True)
    assert all({*one["modules"].values()} == {0, 1} for one in found)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_are_pinned_apart_are_refused(job: Job, kind: str) -> None:
    torch.manual_seed(0)
    with pytest.raises((PartitionError, RemoteError), match="which a backward hook of the other may change"):
        check(job, Hooked(3, kind, "_"), {"": 0, "child": 1, "after": 0}, {})


class Unhooked(Hooked):
    """Gets its hook after the first step."""

    def __init__(self, width: int) -> None:
        super().__init__(width, "an attribute", "_")
        self.child._backward_hooks.clear()


def test_a_hook_that_came_later_and_changes_a_module_elsewhere_is_refused(job: Job) -> None:
    def main(runtime: Runtime) -> None:
        module = Unhooked(3)
        smp.set_partition(module.child, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> None:
            model.backward(model(part).square().mean())

        train(torch.ones(8, 3))
        module.child.register_full_backward_hook(module.note)
        with pytest.raises((FrameError, RemoteError), match=r"'level' of module 'Unhooked' was set in a backward on"):
            train(torch.ones(8, 3))
        module.child._backward_hooks.clear()
        train(torch.ones(8, 3))

    settings = {"auto_partition": False, "default_partition": 0, "microbatches": 4}
    assert job.run(main, settings) == [None, None]


class Recorder:
    """Notes gradients for the script alone."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.last = 0.0

    def __call__(self, _module: nn.Module, _before: object, gradients: tuple[torch.Tensor, ...]) -> None:
        self.norms.append(float(gradients[0].norm()))
        self.last = self.norms[-1]


def test_what_no_forward_uses_keeps_nothing_together(job: Job) -> None:
    def main(runtime: Runtime) -> tuple[bool, int]:
        module = Unhooked(3)
        recorder = Recorder()
        for layer in (module.before, module.child):
            layer.register_full_backward_hook(recorder)
        smp.set_partition(module.child, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> None:
            model.backward(model(part).square().mean())

        train(torch.ones(8, 3))
        return bool(model.placement.one_at_a_time), len(recorder.norms)

    settings = {"auto_partition": False, "default_partition": 0, "microbatches": 4}
    assert job.run(main, settings) == [(False, 4), (False, 4)]
