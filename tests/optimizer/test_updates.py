"""Updates that some ranks made and others did not keep every further step from running, until they are put right."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import set_current_runtime
from shardwright.job.wrapped import WrappedModels
from shardwright.model.updates import Updates, UpdateStatus
from torch import nn

from tests.jobs.runtimes import make_runtime


class Wrapped:
    """A model that this rank owns."""

    def __init__(self, module: nn.Module) -> None:
        self.placement = SimpleNamespace(module=module, owned_parameters=lambda: list(module.parameters()))


class Rank:
    """The second of two ranks."""

    def __init__(self) -> None:
        self.runtime = make_runtime(1, 2)
        self.module = nn.Linear(2, 2)
        self.wrapped = Wrapped(self.module)
        self.runtime[WrappedModels].add(self.wrapped)
        self.updates = self.runtime[Updates]


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    token = set_current_runtime(made.runtime)
    yield made
    token.var.reset(token)


def optimizer_of(rank: Rank) -> torch.optim.Optimizer:
    return torch.optim.SGD(rank.module.parameters(), lr=0.1)


def test_an_update_that_ends_lets_steps_run(rank: Rank) -> None:
    optimizer = optimizer_of(rank)
    rank.updates.begins(optimizer)
    rank.updates.ends(optimizer)
    rank.updates.check()
    assert rank.updates.status() == UpdateStatus(True, False)


def test_an_update_that_does_not_end_keeps_every_step_from_running(rank: Rank) -> None:
    rank.updates.begins(optimizer_of(rank))
    for _ in range(2):
        with pytest.raises(smp.PartialUpdateError, match=r"SGD.step\(\) failed on rank 1"):
            rank.updates.check()


def test_an_optimizer_of_other_weights_is_none_of_the_job(rank: Rank) -> None:
    rank.updates.begins(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    rank.updates.check()


@pytest.mark.parametrize("carried", [False, True])
def test_a_script_that_has_read_the_error_may_go_on(rank: Rank, carried: bool) -> None:
    rank.updates.begins(optimizer_of(rank))
    with pytest.raises(smp.PartialUpdateError) as caught:
        rank.updates.check()
    error: Exception = caught.value
    if carried:
        error = smp.RemoteError(0, "here", None, None, None, "PartialUpdateError", str(error))
    smp.resume_after_failure(error)
    rank.updates.check()


@pytest.mark.parametrize("error", [ValueError("x"), smp.RemoteError(0, "here", None, None, None, "ValueError", "x")])
def test_another_error_does_not_let_steps_run(rank: Rank, error: Exception) -> None:
    rank.updates.begins(optimizer_of(rank))
    with pytest.raises(smp.ConfigError, match="was given ValueError"):
        smp.resume_after_failure(error)
    with pytest.raises(smp.PartialUpdateError):
        rank.updates.check()


@pytest.mark.parametrize(
    ("statuses", "differ"),
    [
        ({0: UpdateStatus(True, True), 1: UpdateStatus(True, False)}, False),
        ({0: UpdateStatus(False, True), 1: UpdateStatus(True, False)}, True),
        (
            {0: UpdateStatus(True, False), 1: UpdateStatus(False, False)},
            False,
        ),  # a script's own way, without any signal
        ({0: UpdateStatus(None, True), 1: UpdateStatus(True, False)}, False),  # nothing to update
        ({0: UpdateStatus(None, False, 2), 1: UpdateStatus(True, False, 2)}, False),
        ({0: UpdateStatus(True, False, None), 1: UpdateStatus(True, False, 2)}, False),  # no batches left
    ],
)
def test_updates_are_compared_where_a_signal_came(rank: Rank, statuses: dict[int, Any], differ: bool) -> None:
    if differ:
        with pytest.raises(
            smp.PartialUpdateError, match=r"ranks \[1\] have updated their weights and ranks \[0\] have not"
        ):
            rank.updates.compare(statuses)
    else:
        rank.updates.compare(statuses)


def test_a_distributed_optimizer_that_some_ranks_leave_out_is_told(rank: Rank) -> None:
    statuses = {0: UpdateStatus(True, False, 2), 1: UpdateStatus(None, False, 0), 2: UpdateStatus(True, False, 2)}
    with pytest.raises(smp.PartialUpdateError, match=r"by ranks \[1\] not at all and ranks \[0, 2\] 2 times"):
        rank.updates.compare(statuses)
    with pytest.raises(smp.PartialUpdateError):
        rank.updates.check()
    rank.updates.forget()
    rank.updates.check()
    assert rank.updates.status().calls == 0
