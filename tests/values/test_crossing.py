"""Ordinary values are arguments and results of modules and steps, without registration, with exact gradients."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, PartitionError, RemoteError, UnsupportedValueError
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.running import MODES, SIZES, check
from tests.values.crossing import KINDS, Crossing, Slotted, Through

NAMES = list(KINDS)
GROUPS = {"first": NAMES[::3], "second": NAMES[1::3], "third": NAMES[2::3]}
#: The name of a ragged size, which every nested tensor has of its own.
_RAGGED = re.compile(r"\bj\d+")


job = job_fixture(2)


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", GROUPS)
def test_values_cross_both_ways_exactly(job: Job, group: str, mode: str, size: str) -> None:
    torch.manual_seed(5)
    before = job.runtimes[0].step.number
    model = Crossing(GROUPS[group], SIZES[size][1])
    check(job, model, {"first": 1, "here": 0, "away": 1}, {"active_microbatches": 4, **MODES[mode]}, size, steps=3)
    assert job.runtimes[0].step.number - before == 3, "no step was run again"


@pytest.mark.parametrize("size", SIZES)
def test_values_are_results_of_a_step(job: Job, size: str) -> None:
    rows, width = SIZES[size]
    layer = nn.Linear(width, width).double()
    batch = torch.randn(2 * rows, width, dtype=torch.float64)

    def made(rows: torch.Tensor, part: torch.Tensor) -> dict[str, Any]:
        return {kind: make(rows, part) for kind, (make, _) in KINDS.items()}

    wanted = [made(layer(part).detach(), part) for part in batch.chunk(2)]

    def main(runtime: Runtime) -> Any:
        module = nn.Sequential(copy.deepcopy(layer))
        smp.set_partition(module[0], 1)
        model = smp.DistributedModel(module)

        @smp.step
        def infer(part: torch.Tensor) -> Any:
            return made(model(part), part)

        return infer(batch)

    for found in job.run(main, {"auto_partition": False, "default_partition": 0, "microbatches": 2}):
        if isinstance(found, BaseException):
            raise found
        for kind, value in found.items():
            for number in range(2):
                found_text, wanted_text = str(_of_microbatch(value, number)), str(wanted[number][kind])
                assert _RAGGED.sub("", found_text) == _RAGGED.sub("", wanted_text), kind


def _of_microbatch(value: Any, number: int) -> Any:
    """A merged result as one microbatch gave it."""
    if isinstance(value, smp.StepOutput):
        return value.outputs[number]
    if isinstance(value, dict):
        return {key: _of_microbatch(item, number) for key, item in value.items()}
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], numpy.ndarray):
        return value[number]
    if isinstance(value, (list, tuple)):
        items = [_of_microbatch(item, number) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if dataclasses.is_dataclass(value):
        copied = object.__new__(type(value))
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(copied, field.name, _of_microbatch(getattr(value, field.name), number))
        return copied
    return value


class Chained(Crossing):
    """Each value passes an ``nn.Sequential``, whose modules send their results straight to the next rank."""

    def __init__(self, kinds: Sequence[str], width: int) -> None:
        super().__init__(kinds, width)
        self.chains = nn.ModuleList([nn.Sequential(*[Through(kind, width) for _ in range(3)]) for kind in kinds])
        del self.here, self.away

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for kind, chain in zip(self.kinds, self.chains, strict=True):
            make, parts = KINDS[kind]
            one, other = parts(chain(make(x, x * 2)))
            x = one.tanh() + other.sin()
        return x


@pytest.mark.parametrize("size", SIZES)
def test_values_pass_a_chain_of_ranks_exactly(job: Job, size: str) -> None:
    torch.manual_seed(5)
    ranks = {f"chains.{number}.{place}": (place + 1) % 2 for number in range(len(KINDS)) for place in range(3)}
    check(job, Chained(NAMES, SIZES[size][1]), ranks, MODES["fast"], size, steps=3)


CHANGES = {
    "Slotted": (lambda: Slotted(torch.zeros(1)), lambda given: setattr(given, "other", 1)),
    "ndarray": (lambda: numpy.zeros(3), lambda given: given.fill(1)),
}


class Changing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.child = nn.Linear(3, 3)
        self.child.register_forward_pre_hook(self._change, with_kwargs=True)

    def _change(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        CHANGES[self.kind][1](kwargs["given"])
        return args, {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x, given=CHANGES[self.kind][0]())


@pytest.mark.parametrize("kind", CHANGES)
def test_a_value_that_a_module_elsewhere_changes_is_refused(job: Job, kind: str) -> None:
    with pytest.raises(RemoteError, match=rf"FrameError: module 'child' changed a {kind} that it was given"):
        check(job, Changing(kind), {"child": 1}, {}, steps=1)


class SparseUse(nn.Module):
    """A module elsewhere is given a sparse tensor, or returns one, and it is written to."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.child = SparseChild(use)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.detach().to_sparse()
        if self.use == "uncoalesced":
            given = torch.sparse_coo_tensor(torch.zeros(2, 3, dtype=torch.int64), self.weight, x.shape)
        result = self.child(x, given)
        if self.use == "itself":
            assert result["given"] is given
            return result["rest"] * self.weight
        if self.use == "caller":
            given.mul_(2)
        if self.use == "result":
            result.mul_(2)
        return result.to_dense() * self.weight


class SparseChild(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.weight = nn.Parameter(torch.ones(3))
        self.kept: Any = None

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> Any:
        if self.use == "child":
            given.mul_(2)
        if self.use == "values":
            given._values().mul_(2)
        if self.use == "caller":
            self.kept = given
        if self.use == "itself":
            return {"given": given, "rest": x * self.weight}
        return (x * self.weight).to_sparse()


REFUSED_USES = {
    "child": "was given a sparse or nested tensor by another rank, and it was written to",
    "values": "was given a sparse or nested tensor by another rank, and it was written to",
    "caller": "kept a sparse or nested tensor that it was given, and it was written to",
    "result": "returned a sparse or nested tensor to another rank, and it was written to",
    "uncoalesced": "is or holds a sparse tensor that requires a gradient and is not coalesced",
}


@pytest.mark.parametrize("use", REFUSED_USES)
def test_sparse_tensors_that_cannot_be_exact_are_refused(job: Job, use: str) -> None:
    with pytest.raises((FrameError, RemoteError, UnsupportedValueError), match=REFUSED_USES[use]):
        check(job, SparseUse(use), {"child": 1}, {}, steps=1)


def test_a_sparse_argument_comes_back_as_itself(job: Job) -> None:
    check(job, SparseUse("itself"), {"child": 1}, {}, steps=1)


class NestedResidual(nn.Module):
    """Adds what a module elsewhere gives to its argument: both must be of one ragged size."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout
        self.first, self.child = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        rows = torch.nested.as_nested_tensor([x[:1], x], layout=self.layout)
        return torch.cat((rows + self.child(rows)).unbind())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_result_is_added_to_its_argument(job: Job) -> None:
    check(job, NestedResidual(torch.jagged), {"child": 1}, {}, steps=2)
    with pytest.raises(PartitionError, match=r"nested tensor that is not jagged .* place them on one rank"):
        check(job, NestedResidual(torch.strided), {"": 0, "child": 1}, {}, steps=1)
