"""Rank 0 says what a start is busy with where that takes long, once for each phase, and nothing where it is quick."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import shardwright as smp
import torch
from shardwright import progress as progress_module
from shardwright.partition import trace
from shardwright.partition.decide import decide
from shardwright.progress import Progress
from torch import nn

from tests.jobs.patience import HANG_SECONDS

#: Long enough for a thread to start on a machine that is busy.
DELAY = 0.05


class Slow(nn.Module):
    """Runs a function in its forward."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.wait = wait

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wait()
        return self.second(self.first(x))


def test_a_phase_that_lasts_is_said_once_while_it_lasts() -> None:
    said: list[str] = []
    told = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        told.set()

    with Progress(0, DELAY, say).phase("tracing"):
        assert told.wait(HANG_SECONDS)
        time.sleep(3 * DELAY)
    assert said == ["rank 0: tracing, for 0.05 s so far"]


def test_a_quick_phase_and_other_ranks_say_nothing() -> None:
    said: list[str] = []
    with Progress(0, 60.0, said.append).phase("tracing"):
        pass
    with Progress(1, 0.0, said.append).phase("tracing"):
        time.sleep(DELAY)
    assert said == []


def test_a_phase_that_fails_is_over() -> None:
    said: list[str] = []
    with pytest.raises(KeyError), Progress(0, 60.0, said.append).phase("tracing"):
        raise KeyError
    for thread in threading.enumerate():
        if thread.name == "shardwright-progress":
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()
    assert said == []


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_a_line_goes_to_the_log_where_one_is_kept(
    level: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(level, logger="shardwright")
    progress_module._say("rank 0: tracing, for 2 s so far")
    in_log = ["rank 0: tracing, for 2 s so far"] if level == logging.INFO else []
    assert [record.message for record in caplog.records] == in_log
    assert capfd.readouterr().err == ("" if in_log else "shardwright: rank 0: tracing, for 2 s so far\n")


def test_a_slow_forward_is_named_as_it_is_traced_and_as_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MIN_OPERATIONS", 0)
    said: list[str] = []
    told = {"tracing": threading.Event(), "measuring": threading.Event()}
    phases = itertools.chain(["tracing"], itertools.repeat("measuring"))

    def say(text: str) -> None:
        said.append(text.split(",")[0])
        told[text.split()[2]].set()

    def wait() -> None:
        assert told[next(phases)].wait(HANG_SECONDS)

    model = Slow(wait)
    settings = SimpleNamespace(
        auto_partition=True, default_partition=0, memory_weight=0.8, skip_tracing=False, refine_partition=True,
        pipeline="interleaved", active_microbatches=2, microbatches=2,
    )  # fmt: skip
    threads = threading.active_count()
    call = functools.partial(model, torch.ones(1, 4))
    decide(model, call, settings, 2, progress=Progress(0, DELAY, say))
    assert said == ["rank 0: tracing one forward of the model", "rank 0: measuring how long each module takes"]
    assert threading.active_count() <= threads + 1


def test_a_quick_start_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    smp.init({})
    try:
        smp.DistributedModel(nn.Linear(2, 2))
    finally:
        smp.shutdown()
    assert "so far" not in capfd.readouterr().err
