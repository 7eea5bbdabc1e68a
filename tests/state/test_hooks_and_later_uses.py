"""What a backward hook changes, where no traced forward uses it: one does later, or another backward hook does."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import PartitionError, RemoteError
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.keepers import Counter
from tests.state.running import MODES, SCHEDULES, SIZES, check

Gradients = tuple[torch.Tensor | None, ...]
SCALES = {"child": 1.5}

job = job_fixture(2)


def size_of(gradients: Gradients) -> float:
    return min(1.0, sum(float(one.norm()) for one in gradients if one is not None))


class Layers(nn.Module):
    """Layers, of which `child` is on another rank."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.made_of = (width, kind)
        self.before, self.child, self.after, self.last = (nn.Linear(width, width) for _ in range(4))
        self.level, self.levels, self.noted = 1.0, {"level": 1.0}, [1.0]
        child: Any = self.child
        child.level = 1.0
        self.hook(kind)

    def __deepcopy__(self, memo: Any) -> Layers:
        """Functions that enclose something are not copied."""
        copied = type(self)(*self.made_of).to(self.before.weight.dtype)
        copied.load_state_dict(self.state_dict())
        return copied

    def hook(self, kind: str) -> None:
        """Register the hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.after(self.child(self.before(x).tanh())))


def set_attribute(module: Layers, level: float) -> None:
    module.level = 0.5 * module.level + level


def put_into_dict(module: Layers, level: float) -> None:
    module.levels["level"] = 0.5 * module.levels["level"] + level


def append(module: Layers, level: float) -> None:
    module.noted.append(level)


CHANGES: dict[str, tuple[Callable[[Layers, float], None], Callable[[Layers], float]]] = {
    "an attribute": (set_attribute, lambda module: module.level),
    "a dict": (put_into_dict, lambda module: module.levels["level"]),
    "a list": (append, lambda module: sum(module.noted)),
}


class UsedLater(Layers):
    """Its forward uses what a backward hook of `child` changes, but not in the first step."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__(width, kind)
        self.counter = Counter()

    def hook(self, kind: str) -> None:
        of_its_own = kind == "an attribute of its own module"
        change, changed = set_attribute if of_its_own else CHANGES[kind][0], None if of_its_own else self

        def hook(own: Any, _given: Gradients, gradients: Gradients) -> None:
            change(own if changed is None else changed, size_of(gradients))

        self.child.register_full_backward_hook(hook)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.child(self.before(x).tanh())
        if self.counter() > 4:
            child: Any = self.child
            x = x / (self.level * self.levels["level"] * sum(self.noted) * child.level)
        return self.last(self.after(x))


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [*CHANGES, "an attribute of its own module"])
def test_a_forward_that_uses_it_in_a_later_step_finds_it(
    job: Job, kind: str, schedule: str, mode: str, size: str
) -> None:
    torch.manual_seed(0)
    model = UsedLater(SIZES[size][1], kind)
    settings = {**MODES[mode], "pipeline": schedule}
    found = check(job, model, {"before": 0, "child": 1}, settings, size, joined=True)
    assert all({*one["modules"].values()} == {0, 1} for one in found)


class Evaluated(Layers):
    """Its forward uses in evaluation alone what hooks of all layers have put into a dict."""

    def hook(self, kind: str) -> None:
        self.sizes: dict[str, float] = {}
        for name, layer in list(self.named_children()):
            layer.register_full_backward_hook(self.made(name))

    def made(self, name: str) -> Callable[..., None]:
        def hook(_own: nn.Module, _given: Gradients, gradients: Gradients) -> None:
            self.sizes[name] = size_of(gradients)

        return hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x if self.training else x * (1 + sum(self.sizes.values()))


def test_an_evaluation_uses_what_hooks_of_all_layers_have_noted(job: Job) -> None:
    batch = torch.randn(8, 160, generator=torch.Generator().manual_seed(3))

    def main(runtime: Runtime) -> tuple[torch.Tensor, set[int]]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(160, 160), Evaluated(160, ""))
        smp.set_partition(module[0], 0)
        smp.set_partition(module[1].get_submodule("child"), 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> None:
            model.backward(model(part).square().mean())

        @smp.step
        def evaluate(part: torch.Tensor) -> torch.Tensor:
            return model(part)

        train(batch)
        model.eval()
        with torch.no_grad():
            found = evaluate(batch).concat()
        assert model.placement.ownership is not None
        return found, {*model.placement.ownership.decision.modules.values()}

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(160, 160), Evaluated(160, ""))
    for part in batch.chunk(4):
        alone(part).square().mean().backward()
    alone.eval()
    expected = torch.cat([alone(part).detach() for part in batch.chunk(4)])
    for found, ranks in job.run(main, {"auto_partition": False, "default_partition": 0, "microbatches": 4}):
        torch.testing.assert_close(found, expected)
        assert ranks == {0, 1}


CHAINED = ["an attribute", *(f"enclosed: {kind}" for kind in CHANGES)]


class Chained(Layers):
    """A backward hook of `after` changes what one of `child`, which runs later, scales gradients by."""

    def hook(self, kind: str) -> None:
        change, read = CHANGES[kind.removeprefix("enclosed: ")]
        held: Any = self
        if kind.startswith("enclosed: "):
            held = types.SimpleNamespace(level=1.0, levels={"level": 1.0}, noted=[1.0])

        def note(_own: nn.Module, _given: Gradients, gradients: Gradients) -> None:
            change(held, size_of(gradients))

        def scale(_own: nn.Module, given: Gradients, _gradients: Gradients) -> Gradients:
            return tuple(None if one is None else one * read(held) for one in given)

        self.after.register_full_backward_hook(note)
        self.child.register_full_backward_hook(scale)


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", CHAINED)
def test_another_backward_hook_that_uses_it_finds_it(job: Job, kind: str, schedule: str, mode: str, size: str) -> None:
    torch.manual_seed(0)
    model = Chained(SIZES[size][1], kind)
    settings = {**MODES[mode], "pipeline": schedule}
    found = check(job, model, {"before": 0, "child": 1}, settings, size, joined=True)
    assert all({*one["modules"].values()} == {0, 1} for one in found)


@pytest.mark.parametrize("module", [UsedLater, Chained])
@pytest.mark.parametrize("kind", CHANGES)
def test_parts_that_are_pinned_apart_are_refused(job: Job, kind: str, module: type[Layers]) -> None:
    torch.manual_seed(0)
    with pytest.raises((PartitionError, RemoteError), match="which a backward hook of the other may change"):
        check(job, module(3, kind), {"": 0, "before": 0, "child": 1, "after": 0}, {})


def _records(module: Layers, sizes: dict[str, float], every: list[float]) -> None:
    """Hooks that only record, for the script alone."""
    for name, layer in list(module.named_children()):
        layer.register_full_backward_hook(lambda _own, _given, gradients: every.append(size_of(gradients)))

        def hook(own: nn.Module, _given: Gradients, gradients: Gradients, name: str = name) -> None:
            sizes[f"{name} of {type(own)}"] = size_of(gradients)

        layer.register_full_backward_hook(hook)


def _scales(module: Layers, sizes: dict[str, float], every: list[float]) -> None:
    """Hooks that scale gradients by what nobody changes."""
    for layer in module.children():
        layer.register_full_backward_hook(
            lambda _own, given, _gradients: tuple(None if one is None else one * SCALES["child"] for one in given)
        )


@pytest.mark.parametrize("register", [_records, _scales])
def test_what_has_no_effect_on_another_keeps_nothing_together(job: Job, register: Callable[..., None]) -> None:
    def main(runtime: Runtime) -> tuple[bool, set[int]]:
        module = Layers(3, "")
        register(module, {}, [])
        smp.set_partition(module.child, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> None:
            model.backward(model(part).square().mean())

        train(torch.ones(8, 3))
        assert model.placement.ownership is not None
        return bool(model.placement.one_at_a_time), {*model.placement.ownership.decision.modules.values()}

    settings = {"auto_partition": False, "default_partition": 0, "microbatches": 4}
    assert job.run(main, settings) == [(False, {0, 1})] * 2
