"""A peer's request may overtake the root's decision, and the task that it starts must give the turn up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from shardwright.errors import StepAborted
from shardwright.model.placement import Placement
from torch import nn

from tests.jobs.unconnected import unconnected_runtime

TASK: Any = SimpleNamespace(worker=5, microbatch=0)


class Server:
    """Runs the main thread's work while a task waits, as the execution server does, and at no other time."""

    def __init__(self, placement: Placement, *, fails: bool) -> None:
        self.placement, self.fails = placement, fails
        self.sent: list[dict[str, Any]] = []

    def send_request(self, worker: int, **fields: Any) -> int:
        self.sent.append({"worker": worker, **fields})
        return 7

    def wait(self, worker: int, requests: list[int], phase: str) -> None:
        assert (worker, requests) == (5, [7])
        if self.fails:
            self.placement._failed = True
        self.placement._finish()


def placement(*, fails: bool = False) -> Placement:
    model: Any = nn.Linear(2, 2)
    model.model_id, model._options = 3, {"average_grads_across_microbatches": True}
    runtime = unconnected_runtime(1, 3, pp_size=3)
    made = Placement(runtime, model, nn.Linear(2, 2))
    made.kept_model = model  # type: ignore[attr-defined]
    runtime.server = Server(made, fails=fails)
    return made


def test_a_task_that_comes_before_the_decision_waits_for_the_roots_answer() -> None:
    early = placement()
    early.wait_until_placed(TASK)
    early.wait_until_placed(TASK)
    (request,) = early.runtime.server.sent  # type: ignore[attr-defined]
    assert (request["worker"], request["to"], request["kind"], request["model"]) == (5, 0, "control", 3)


def test_a_task_of_a_model_that_could_not_be_placed_ends() -> None:
    with pytest.raises(StepAborted):
        placement(fails=True).wait_until_placed(TASK)
