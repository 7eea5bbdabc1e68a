"""Submodules that a forward exchanges, replaces, adds or deletes around a call of a module elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import shardwright as smp
import torch
from shardwright.execution.state_order import StateOrder
from shardwright.job.runtime import Runtime
from torch import nn
from torch.func import functional_call

from tests.frames.job import Job, job_fixture
from tests.state.keepers import Counter
from tests.state.running import MODES, SCHEDULES, SIZES, check

job = job_fixture(2)


class Exchanges(nn.Module):
    """Calls `child`, which runs on another rank, while its own modules are others."""

    def __init__(self, width: int, kind: str, first: int) -> None:
        super().__init__()
        self.kind, self.first = kind, first
        self.counter = Counter()
        self.before, self.child, self.own = (nn.Linear(width, width) for _ in range(3))
        self.listed = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.named = nn.ModuleDict({"one": nn.Linear(width, width), "other": nn.Linear(width, width)})
        self.chain = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.after = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x).tanh()
        # In a later branch, only some microbatches do.
        changes = self.counter() > self.first and (self.first == 0 or float(x.detach().sum()) > 0)
        x = KINDS[self.kind](self, x) if changes else self.used(self.child(x))
        return self.after(x.tanh())

    def exchange(self) -> None:
        """Past ``__setattr__``."""
        self._modules["own"], self._modules["before"] = self._modules["before"], self._modules["own"]

    def used(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.own is None else self.own(x)
        x = self.extra(x) if hasattr(self, "extra") else x
        x = self.named["one"](self.listed[0](x.tanh()))
        return self.chain(x.tanh())


def _attributes(module: Exchanges, x: torch.Tensor) -> torch.Tensor:
    module.own, module.child = module.child, module.own
    x = module.used(module.child(x).tanh())
    module.own, module.child = module.child, module.own
    return x


def _past_setattr(module: Exchanges, x: torch.Tensor) -> torch.Tensor:
    module.exchange()
    x = module.used(module.child(x).tanh())
    module.exchange()
    return x


def _none(module: Exchanges, x: torch.Tensor) -> torch.Tensor:
    own, module.own = module.own, None
    x = module.used(module.child(x))
    module.own = own
    return x


def _replaced(module: Exchanges, x: torch.Tensor) -> torch.Tensor:
    own, module.own = module.own, nn.Identity()
    x = module.used(module.child(x))
    module.own = own
    return x


def _added(module: Exchanges, x: torch.Tensor) -> torch.Tensor:
    module.extra = module.own
    x = module.used(module.child(x))
    del module.extra
    return x


def _in_a_list(module: Exchanges, x: torch.Tensor) -> torch.Tensor:
    module.listed[0], module.listed[1] = module.listed[1], module.listed[0]
    x = module.used(module.child(x))
    module.listed[0], module.listed[1] = module.listed[1], module.listed[0]
    return x


def _inserted(module: Exchanges, x: torch.Tensor) -> torch.Tensor:
    module.listed.insert(0, nn.Identity())
    x = module.used(module.child(x))
    del module.listed[0]
    return x


def _in_a_dict(module: Exchanges, x: torch.Tensor) -> torch.Tensor:
    module.named["one"], module.named["other"] = module.named["other"], module.named["one"]
    x = module.used(module.child(x))
    module.named["one"], module.named["other"] = module.named["other"], module.named["one"]
    return x


def _popped(module: Exchanges, x: torch.Tensor) -> torch.Tensor:
    one = module.named.pop("one")
    module.named["one"] = module.own
    x = module.used(module.child(x))
    other = module.named.pop("other")
    module.named["one"] = one
    module.named["other"] = other
    return x


def _in_a_sequential(module: Exchanges, x: torch.Tensor) -> torch.Tensor:
    module.chain[0], module.chain[2] = module.chain[2], module.chain[0]
    x = module.used(module.child(x))
    module.chain[0], module.chain[2] = module.chain[2], module.chain[0]
    return x


def _method(module: Exchanges, x: torch.Tensor) -> torch.Tensor:
    used, scale = module.used, float(x.detach().sum())
    module.used = lambda x: used(x) * scale
    x = module.used(module.child(x))
    del module.used
    return x


KINDS: dict[str, Callable[[Exchanges, torch.Tensor], torch.Tensor]] = {
    "two attributes": _attributes,
    "two attributes, past __setattr__": _past_setattr,
    "None": _none,
    "another module": _replaced,
    "one more": _added,
    "in a list": _in_a_list,
    "one more in a list": _inserted,
    "in a dict": _in_a_dict,
    "one less in a dict": _popped,
    "in a sequential": _in_a_sequential,
    "a method": _method,
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_modules_are_those_of_the_same_microbatch(
    job: Job, kind: str, first: int, schedule: str, mode: str, size: str
) -> None:
    torch.manual_seed(0)
    model = Exchanges(SIZES[size][1], kind, first)
    found = check(job, model, {"child": 1}, {**MODES[mode], "pipeline": schedule}, size, joined=True)
    assert all(one["modules"]["child"] != one["modules"]["before"] for one in found)


def test_a_sequential_over_ranks_whose_parts_are_exchanged(job: Job) -> None:
    torch.manual_seed(0)
    model = Exchanges(3, "in a sequential", 0)
    check(job, model, {"child": 1, "chain.0": 1, "chain.2": 0}, {}, joined=True)
    check(job, Exchanges(3, "in a sequential", 5), {"child": 1, "chain.0": 1, "chain.2": 0}, {}, joined=True)


class Fails(Exchanges):
    """Ends with an error while its modules are others."""

    def used(self, x: torch.Tensor) -> torch.Tensor:
        if self.own is None or len(self.listed) > 2 or len(self.named) > 2 or hasattr(self, "extra"):
            raise KeyError("the script's own")
        return super().used(x)


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("kind", ["None", "one more", "one more in a list"])
def test_a_step_that_fails_meanwhile_leaves_the_modules_as_they_were(job: Job, kind: str, first: int) -> None:
    def main(runtime: Runtime) -> bool:
        torch.manual_seed(0)
        module = Fails(3, kind, first)
        names = [name for name, _ in module.named_modules()]
        smp.set_partition(module.child, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> None:
            model.backward(model(part).square().mean())

        for _ in range(6):
            try:
                train(torch.randn(8, 3))
            except (KeyError, smp.RemoteError):
                break
        else:
            return False
        return [name for name, _ in module.named_modules()] == names

    settings = {"auto_partition": False, "default_partition": 0, "microbatches": 4}
    assert job.run(main, settings) == [True, True]


class OtherWeights(nn.Module):
    """Calls a module of its own with weights that depend on the microbatch, on what another rank gives or around it."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.before, self.child, self.own, self.after = (nn.Linear(width, width) for _ in range(4))
        self.pair = Pair(self.own, self.child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, x = x, self.before(x)
        weight = self.own.weight * given.mean()
        if self.kind == "around":
            x = functional_call(self.pair, {"own.weight": weight}, (x,))
        else:
            x = functional_call(self.own, {"weight": weight}, (self.child(x),))
        return self.after(x)


class Pair(nn.Module):
    """Two modules of another one."""

    def __init__(self, own: nn.Module, child: nn.Module) -> None:
        super().__init__()
        self.own, self.child = own, child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.child(x).tanh())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["given", "around"])
def test_weights_for_one_call_are_those_of_the_same_microbatch(
    job: Job, kind: str, schedule: str, mode: str, size: str
) -> None:
    torch.manual_seed(0)
    settings = {**MODES[mode], "pipeline": schedule}
    check(job, OtherWeights(SIZES[size][1], kind), {"child": 1}, settings, size)
    one_at_a_time = any(runtime[StateOrder].one_at_a_time for runtime in job.runtimes)
    assert one_at_a_time == (kind == "around")
