"""A peer's request may overtake the root's decision, and the task that it starts must give the turn up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from shardwright import _core
from shardwright.errors import StepAborted
from shardwright.model.placement import Placement
from torch import nn

from tests.jobs.runtimes import make_runtime

TASK: Any = SimpleNamespace(worker=5, microbatch=0)


class Server:
    """Runs the main thread's work while a task waits, as the execution server does, and at no other time."""

    def __init__(self, placement: Placement, *, fails: bool) -> None:
        self.placement, self.fails = placement, fails
        self.sent: list[tuple[int, int, int, str]] = []

    def send_control(self, worker: int, to: int, place: _core.Place, name: str, spec: Any, parts: Any) -> int:
        self.sent.append((worker, to, place.model, name))
        return 7

    def wait(self, worker: int, requests: list[int], phase: str) -> None:
        assert (worker, requests) == (5, [7])
        if self.fails:
            self.placement._failed = True
        self.placement._finish()


def placement(*, fails: bool = False) -> Placement:
    model: Any = nn.Linear(2, 2)
    model.model_id, model._options = 3, {"average_grads_across_microbatches": True}
    runtime = make_runtime(1, 3, pp_size=3)
    made = Placement(runtime, model, nn.Linear(2, 2))
    made.kept_model = model  # type: ignore[attr-defined]
    runtime.server = Server(made, fails=fails)
    return made


def test_a_task_that_comes_before_the_decision_waits_for_the_roots_answer() -> None:
    early = placement()
    early.wait_until_placed(TASK)
    early.wait_until_placed(TASK)
    assert early.runtime.server.sent == [(5, 0, 3, "sent partition")]  # type: ignore[attr-defined]


def test_a_task_of_a_model_that_could_not_be_placed_ends() -> None:
    with pytest.raises(StepAborted):
        placement(fails=True).wait_until_placed(TASK)
