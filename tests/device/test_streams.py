"""Streams of scripts: what is asked of CUDA, in which order; no GPU is needed to see that."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright.execution import process, results
from shardwright.execution.context import StepState
from shardwright.frames.cut import EngineCall, _add


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


class Streams:
    """Notes what is given to which stream, in the place of CUDA's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[tuple[str, ...]] = []
        self.current = self.stream("main")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)

    def stream(self, name: str) -> Any:
        def note(what: str, *others: Any) -> None:
            self.order.append((name, what, *(other.name for other in others)))

        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: note("waits for", other),
            synchronize=lambda: note("is waited for by the host"),
        )

    @contextlib.contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


GPU = torch.device("cuda", 0)


def test_a_result_that_is_first_used_on_another_stream_comes_on_that_of_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)

    def take(index: int, device: torch.device) -> str:
        streams.order.append((streams.current.name, "takes", str(device)))
        return "values"

    response: Any = SimpleNamespace(take=take)
    made = results._Tensor(response, 0, ("float32", [1], [1], "cuda", True), GPU, streams.current)
    assert made.take() == "values"
    assert streams.order == [("main", "takes", "cuda:0")]
    streams.order.clear()
    with torch.cuda.stream(streams.stream("side")):
        assert made.take() == "values"
        assert streams.current.name == "side"
    assert streams.order == [("main", "takes", "cuda:0"), ("main", "is waited for by the host")]


def test_a_gradient_that_a_cut_gets_on_another_stream_is_ordered_before_what_follows_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    recorded: list[str] = []
    gradient: Any = SimpleNamespace(device=GPU, record_stream=lambda stream: recorded.append(stream.name))
    slot: Any = SimpleNamespace(add=lambda tensor: streams.order.append((streams.current.name, "adds")))
    with EngineCall():
        _add(slot, gradient)
        with torch.cuda.stream(streams.stream("side")):
            _add(slot, gradient)
    assert streams.order == [("main", "adds"), ("main", "waits for", "side"), ("main", "adds")]
    assert recorded == ["main"]
