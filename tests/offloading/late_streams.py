"""Streams whose copies run as late as possible, each direction in its own order, where there is no device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class LateEvent:
    """A place among the copies of a stream. Each look lets one more copy run."""

    def __init__(self, stream: _Stream | None, number: int) -> None:
        self._stream, self.number = stream, number

    def query(self) -> bool:
        stream = self._stream
        done = stream is None or stream.ran >= self.number
        if stream is not None and not done:
            stream.run(stream.ran + 1)
        return done

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.streams.waits += 1
        self.reach()

    def reach(self) -> None:
        """Let the copies before it run."""
        if self._stream is not None:
            self._stream.run(self.number)


class _Stream:
    """The copies of one direction."""

    def __init__(self, streams: LateStreams) -> None:
        self.streams = streams
        self._copies: deque[tuple[LateEvent, Callable[[], Any]]] = deque()
        self.begun = self.ran = 0

    def run(self, number: int) -> None:
        with self.streams.lock:
            while self.ran < number:
                after, copy = self._copies.popleft()  # which no longer keeps memory then
                after.reach()
                copy()
                self.ran += 1

    def later(self, after: LateEvent, copy: Callable[[], Any]) -> LateEvent:
        with self.streams.lock:
            self._copies.append((after, copy))
            self.begun += 1
            return LateEvent(self, self.begun)


class LateStreams:
    """Copies wait until somebody waits for them or has looked often enough; until then their targets are garbage."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._out, self._in = _Stream(self), _Stream(self)
        self._locked: list[torch.Tensor] = []
        self.waits = 0
        self.log: list[str] = []

    @property
    def ran(self) -> int:
        return self._out.ran + self._in.ran

    @property
    def under_way(self) -> int:
        """How many copies have begun and not run."""
        return self._out.begun + self._in.begun - self.ran

    @property
    def locked_bytes(self) -> int:
        return sum(block.numel() for block in self._locked)

    def serves(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def computed(self, device: torch.device) -> LateEvent:
        return LateEvent(None, 0)  # a processor has computed when it goes on

    def copy_out(self, source: torch.Tensor, into: torch.Tensor, after: LateEvent) -> LateEvent:
        assert self.is_locked(into)
        self.log.append("out")
        _bits(into).fill_(0xA5)
        expected = source.clone()

        def copy() -> None:
            assert torch.equal(_bits(source), _bits(expected)), "memory of a device has changed under a copy"
            into.copy_(source)

        return self._out.later(after, copy)

    def copy_in(self, source: torch.Tensor, into: torch.Tensor, after: LateEvent) -> LateEvent:
        assert self.is_locked(source)
        self.log.append("in")
        expected = source.clone()

        def copy() -> None:
            assert torch.equal(_bits(source), _bits(expected)), "host memory has changed under a copy"
            into.copy_(source)

        return self._in.later(after, copy)

    def copy_back(self, source: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, LateEvent]:
        assert self.is_locked(source)
        self.log.append("back")
        tensor = torch.full_like(source, 0x5A)
        expected = source.clone()

        def copy() -> None:
            assert torch.equal(source, expected), "host memory has changed under a copy"
            tensor.copy_(source)

        return tensor, self._in.later(LateEvent(None, 0), copy)

    def use(self, tensor: torch.Tensor, after: LateEvent) -> None:
        self.log.append("use")
        after.reach()

    def wait(self, device: torch.device, after: LateEvent) -> None:
        after.reach()

    def enter(self, device: torch.device) -> None:
        self.log.append("enter")

    def locked(self, nbytes: int) -> torch.Tensor:
        self._locked.append(torch.empty(nbytes, dtype=torch.uint8))
        return self._locked[-1]

    def is_locked(self, tensor: torch.Tensor) -> bool:
        starts = ((block.data_ptr(), block.numel()) for block in self._locked)
        return any(start <= tensor.data_ptr() < start + nbytes for start, nbytes in starts)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
