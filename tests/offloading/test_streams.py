"""Which streams copies of a device are on, and what they wait for: a stand-in for ``torch.cuda`` takes notes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shardwright.offloading.streams import CudaStreams


class Stream:
    """Notes what it is given."""

    def __init__(self, *_: Any) -> None:
        self.waited: list[Event] = []

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)


class Event:
    """A place in a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, Stream]]:
    """What was told to the allocator."""
    current = [Stream()]
    found: list[tuple[torch.Tensor, Stream]] = []

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: current[-1])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: found.append((tensor, stream)))
    return found


def test_a_copy_back_is_not_behind_copies_that_wait_for_what_is_computed(
    recorded: list[tuple[torch.Tensor, Stream]],
) -> None:
    streams: Any = CudaStreams()
    here = torch.device("cpu")
    source, host = torch.arange(5.0), torch.empty(5)
    computed = streams.computed(here)
    out = streams.copy_out(source, host, computed)
    tensor, back = streams.copy_back(host, here)
    assert out.stream is not back.stream
    assert out.stream.waited == [computed]
    assert back.stream.waited == []
    assert recorded == [(source, out.stream)]
    into = torch.empty(5)
    brought = streams.copy_in(host, into, out)
    assert brought.stream is back.stream
    assert back.stream.waited == [out]
    streams.use(tensor, back)
    assert computed.stream.waited == [back]
    assert [stream for _, stream in recorded] == [out.stream, back.stream, computed.stream]
    assert torch.equal(into, source)
