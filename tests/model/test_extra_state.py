"""What modules keep beside tensors is asked of the rank that runs them; an error there reaches all ranks.

Ranks are threads of one process, beside one plain process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, in_process_ranks

INPUTS = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


class Counting(nn.Linear):
    """Keeps a number, a list, a deque, a dict and a tensor, which its forward changes."""

    def __init__(self) -> None:
        super().__init__(3, 3, dtype=torch.float64)
        self.number, self.list, self.deque, self.dict = 0, list[int](), deque[int](maxlen=3), dict[str, int]()
        self.tensor = torch.zeros(1, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.list.append(self.number)
        self.deque.append(self.number)
        self.dict["calls"] = self.dict.get("calls", 0) + 1
        self.tensor = self.tensor + inputs.detach().sum()
        return super().forward(inputs) + len(self.list) + self.deque[0] + self.dict["calls"] + self.tensor.clone()


class Extra(Counting):
    """Tells of it in its extra state."""

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "number": int(self.number),
            "list": list(self.list),
            "deque": list(self.deque),
            "dict": dict(self.dict),
            "tensor": self.tensor.clone(),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.number, self.list[:] = state["number"], state["list"]
        self.deque.clear()
        self.deque.extend(state["deque"])
        self.dict = dict(state["dict"])
        self.tensor = state["tensor"].clone()


class Written(Counting):
    """Writes it into state dicts past torch's way."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "sum"] = torch.tensor(sum(self.list))
        destination[prefix + "tensor"] = self.tensor.clone()


class Failing(Counting):
    """Cannot tell of it after its first call."""

    def get_extra_state(self) -> dict[str, Any]:
        if int(self.number):
            raise KeyError("no such state")
        return {}


class Unsendable(Counting):
    """Tells something of a type that cannot be sent."""

    def get_extra_state(self) -> object:
        return object()


def net(first: type[nn.Module], last: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(first(), last())


def divided(first: type[nn.Module], last: type[nn.Module], steps: int = 1) -> smp.DistributedModel:
    module = net(first, last)
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    for _ in range(steps):
        stepped(model, INPUTS)
    return model


def plain(first: type[nn.Module], last: type[nn.Module], steps: int) -> nn.Sequential:
    module = net(first, last)
    for _ in range(steps):
        for part in INPUTS.chunk(2):
            module(part)
    return module


@smp.step(microbatches=2)
def stepped(model: smp.DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    if torch.is_grad_enabled():
        model.backward(loss)
    return loss


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with in_process_ranks():
        made = Job(2)
        yield made
        made.close()


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
        else:
            tensor, other = found[name].pop("tensor"), value.pop("tensor")
            torch.testing.assert_close(tensor, other, rtol=1e-12, atol=1e-12, msg=name)
            assert found[name] == value, name


@pytest.mark.parametrize("kind", [Extra, Written])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_state_dict_has_what_the_rank_says_that_runs_the_module(job: Job, kind: type[nn.Module], steps: int) -> None:
    def main(runtime: Runtime) -> dict[str, Any]:
        return divided(kind, kind, steps).state_dict()

    for state in job.run(main, {}):
        check_same(state, plain(kind, kind, steps).state_dict())


def test_a_state_dict_loads_where_modules_are_run_and_leaves_placeholders_elsewhere(job: Job) -> None:
    state = plain(Extra, Extra, 3).state_dict()
    after = plain(Extra, Extra, 4)

    def main(runtime: Runtime) -> dict[str, Any]:
        model = divided(Extra, Extra)
        other = model.module[1 - runtime.place.pp_rank]
        model.load_state_dict({name: value for name, value in state.items()})
        with pytest.raises(smp.NotOwnedError):
            len(other.list)
        model.load_state_dict(model.local_state_dict(), same_partition_load=True)
        model.load_state_dict(model.local_state_dict())
        stepped(model, INPUTS)
        return model.state_dict()

    for found in job.run(main, {}):
        check_same(found, after.state_dict())


@pytest.mark.parametrize(
    ("kinds", "first_fails"), [((Failing, Extra), True), ((Extra, Failing), False)], ids=["first", "last"]
)
@pytest.mark.parametrize("to_first", [False, True])
def test_an_error_of_one_rank_reaches_all(
    job: Job, kinds: tuple[type[nn.Module], type[nn.Module]], first_fails: bool, to_first: bool
) -> None:
    def main(runtime: Runtime) -> tuple[str, str]:
        model = divided(*kinds)
        with pytest.raises((KeyError, smp.RemoteError), match="no such state") as caught:
            model.state_dict(gather_to_rank0=to_first)
        stepped(model, INPUTS)  # ranks go on together
        return type(caught.value).__name__, str(caught.value)

    results = job.run(main, {})
    (own, _), (other, told) = results if first_fails else results[::-1]
    assert (own, other) == ("KeyError", "RemoteError")
    assert f"rank {0 if first_fails else 1} on host" in told


def test_what_cannot_be_sent_is_told_on_all_ranks(job: Job, tmp_path: Path) -> None:
    def main(runtime: Runtime) -> str:
        model = divided(Extra, Unsendable)
        with pytest.raises((smp.UnsupportedValueError, smp.RemoteError)) as caught:
            model.state_dict()
        with pytest.raises(smp.CheckpointError, match="rank 1"):
            smp.save_checkpoint(tmp_path, "t", partial=False, model=model)
        smp.barrier()
        return type(caught.value).__name__

    assert job.run(main, {}) == ["RemoteError", "UnsupportedValueError"]


def test_a_full_checkpoint_that_a_module_fails_is_refused_on_all_ranks(job: Job, tmp_path: Path) -> None:
    def main(runtime: Runtime) -> None:
        model = divided(Extra, Failing)
        for is_partial in (False, True):
            with pytest.raises(smp.CheckpointError, match=r"rank 1.*no such state"):
                smp.save_checkpoint(tmp_path, "t", partial=is_partial, model=model)
        smp.barrier()

    assert job.run(main, {}) == [None, None]
