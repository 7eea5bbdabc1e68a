"""Each microbatch has its own values of the attributes that forwards set before they read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from shardwright.errors import StateWriteError
from shardwright.execution.attributes import Attributes
from shardwright.execution.context import StepState
from shardwright.execution.task import RunningTask, set_running_task
from torch import nn

from tests.jobs.runtimes import make_runtime


class Module(nn.Module):
    """A class of its own, whose reads may be watched."""


class Defaults(nn.Module):
    """Has a default for what its objects set."""

    kept: Any = "of the class"


class Ranks:
    """Microbatches that take turns on one rank."""

    def __init__(self, module: nn.Module, *, added: bool = True, hides: bool = True) -> None:
        self.module, self.attributes = module, Attributes()
        self.runtime = make_runtime()
        self.attributes.begin_step()
        self.attributes.hides = hides
        if added:
            self.attributes.add(module, "kept")

    def enter(self, microbatch: int) -> None:
        self.microbatch = microbatch
        set_running_task(RunningTask(self.runtime, 0, "m", microbatch, "forward", StepState.capture()))
        self.attributes.enter(microbatch)

    def set(self, value: Any) -> None:
        self.attributes.is_set(self.module, "kept", self.microbatch)
        self.module.kept = value


@pytest.fixture(autouse=True)
def no_task() -> Iterator[None]:
    yield
    set_running_task(None)


@pytest.mark.parametrize("hides", [False, True])
def test_a_microbatch_finds_what_it_set_and_the_last_one_s_values_stay(hides: bool) -> None:
    ranks = Ranks(module := Module(), hides=hides)
    ranks.enter(0)
    ranks.set("of 0")
    ranks.enter(1)
    ranks.set("of 1")
    ranks.enter(0)
    assert module.kept == "of 0"
    ranks.enter(2)
    ranks.enter(1)
    assert module.kept == "of 1"
    ranks.enter(0)
    ranks.attributes.end_step()
    assert module.kept == "of 1", "microbatch 2 set nothing, and in one process finds what microbatch 1 has left"
    ranks.attributes.close()


def test_what_a_microbatch_has_not_set_is_refused_to_it_and_to_the_first_one_is_what_was_there() -> None:
    module = Module()
    module.kept = "of the script"
    ranks = Ranks(module)
    ranks.enter(1)
    with pytest.raises(StateWriteError, match="attribute 'kept' of a Module was read before it was set"):
        _ = module.kept
    with pytest.raises(StateWriteError):
        hasattr(module, "kept")
    ranks.enter(0)
    assert module.kept == "of the script"
    ranks.set("of 0")
    ranks.enter(1)
    with pytest.raises(StateWriteError):
        getattr(module, "kept", None)
    ranks.attributes.rollback()
    assert module.kept == "of the script"
    ranks.attributes.close()
    assert "__getattr__" not in vars(Module)


def test_where_microbatches_run_one_after_another_each_finds_what_the_one_before_has_left() -> None:
    ranks = Ranks(module := Module(), hides=False)
    ranks.enter(0)
    ranks.set("of 0")
    ranks.enter(1)
    assert module.kept == "of 0"
    ranks.attributes.close()


def test_a_microbatch_that_deletes_what_it_set_finds_nothing_there() -> None:
    ranks = Ranks(module := Module())
    ranks.enter(1)
    ranks.set("of 1")
    del module.kept
    assert not hasattr(module, "kept")
    ranks.enter(0)
    ranks.enter(1)
    assert not hasattr(module, "kept")
    ranks.attributes.close()


def test_where_a_class_has_a_default_it_is_told_who_may_have_read_it() -> None:
    ranks = Ranks(module := Defaults())
    ranks.enter(0)
    ranks.set("of 0")
    ranks.enter(1)
    assert module.kept == "of the class", "nobody can notice this"
    assert ranks.attributes.set_by_some(2) == (module, "kept")
    ranks.set("of 1")
    assert ranks.attributes.set_by_some(2) is None
    ranks.attributes.close()


@pytest.mark.parametrize("hides", [False, True])
def test_attributes_may_come_while_a_microbatch_runs(hides: bool) -> None:
    ranks = Ranks(module := Module(), added=False, hides=hides)
    ranks.enter(0)
    ranks.enter(1)
    ranks.attributes.add(module, "kept")
    ranks.set("of 1")
    ranks.enter(0)
    ranks.set("of 0")
    ranks.attributes.end_step()
    assert module.kept == "of 1"
    ranks.attributes.close()
