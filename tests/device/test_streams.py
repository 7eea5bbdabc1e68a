"""Tasks run on the stream on which the script called the step function; no GPU is needed to see that it is set."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from shardwright.execution import process
from shardwright.execution.context import StepState


def test_a_task_in_a_new_thread_has_the_scripts_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = object()
    before = StepState.capture()
    monkeypatch.setattr(process, "cuda_in_use", lambda: True)
    monkeypatch.setattr(process, "random_state", lambda: before.random)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    captured = StepState.capture()
    assert (before.cuda_stream, captured.cuda_stream) == (None, stream)
    entered: list[tuple[str, Any]] = []

    def set_stream(which: Any) -> None:
        entered.append((threading.current_thread().name, which))

    def task() -> None:
        with captured.applied():
            pass

    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    thread = threading.Thread(target=task, name="worker")
    thread.start()
    thread.join()
    assert entered == [("worker", stream)]
