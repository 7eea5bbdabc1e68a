"""Streams whose copies run late, in the order in which they were begun, where there is no device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class LateEvent:
    """A place among the copies. Each look lets one more copy run."""

    def __init__(self, streams: LateStreams, number: int) -> None:
        self._streams, self._number = streams, number

    def query(self) -> bool:
        done = self._streams.ran >= self._number
        if not done:
            self._streams.run(self._streams.ran + 1)
        return done

    def synchronize(self) -> None:
        self._streams.waits += 1
        self._streams.run(self._number)


class LateStreams:
    """Copies wait until somebody waits for them or has looked often enough; until then their targets are garbage."""

    def __init__(self) -> None:
        self._copies: deque[Callable[[], Any]] = deque()
        self._begun = 0
        self._locked: list[torch.Tensor] = []
        self.ran = 0
        self.waits = 0
        self.log: list[str] = []

    def run(self, number: int) -> None:
        while self.ran < number:
            self._copies.popleft()()  # which no longer keeps memory then
            self.ran += 1

    @property
    def locked_bytes(self) -> int:
        return sum(block.numel() for block in self._locked)

    def serves(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def computed(self, device: torch.device) -> LateEvent:
        return LateEvent(self, 0)  # a processor has computed when it goes on

    def copy_out(self, source: torch.Tensor, into: torch.Tensor, after: LateEvent) -> LateEvent:
        assert self.is_locked(into)
        self.log.append("out")
        into.fill_(0xA5)
        return self._later(lambda: into.copy_(source))

    def copy_back(self, source: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, LateEvent]:
        assert self.is_locked(source)
        self.log.append("back")
        tensor = torch.full_like(source, 0x5A)
        expected = source.clone()

        def copy() -> None:
            assert torch.equal(source, expected), "host memory has changed under a copy"
            tensor.copy_(source)

        return tensor, self._later(copy)

    def use(self, tensor: torch.Tensor, after: LateEvent) -> None:
        self.log.append("use")
        self.run(after._number)

    def locked(self, nbytes: int) -> torch.Tensor:
        self._locked.append(torch.empty(nbytes, dtype=torch.uint8))
        return self._locked[-1]

    def is_locked(self, tensor: torch.Tensor) -> bool:
        starts = ((block.data_ptr(), block.numel()) for block in self._locked)
        return any(start <= tensor.data_ptr() < start + nbytes for start, nbytes in starts)

    def _later(self, copy: Callable[[], Any]) -> LateEvent:
        self._copies.append(copy)
        self._begun += 1
        return LateEvent(self, self._begun)
