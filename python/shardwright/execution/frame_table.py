"""The frames on a rank that wait for their backward."""

from __future__ import annotations

from collections import Counter

from torch import nn

from shardwright.frames import Frame
from shardwright.frames.watch import Watched
from shardwright.frames.weights import WeightGradients

#: The key of a frame: the requester's rank and the id of the forward request.
FrameKey = tuple[int, int]


class FrameTable:
    """The frames of forward requests that this rank has executed and that still wait for their backward."""

    def __init__(self) -> None:
        """Create an empty table; it is empty again after every step."""
        self._frames: dict[FrameKey, Frame] = {}
        self._visits: Counter[tuple[nn.Module, int]] = Counter()
        self._watched: dict[int, list[Watched]] = {}
        self._left: dict[int, tuple[WeightGradients, int]] = {}
        #: Frames that successful steps left to be cleared away; anything but 0 is a bug.
        self.unclosed = 0

    def __len__(self) -> int:
        """Return the number of frames."""
        return len(self._frames)

    def visited_again(self, frame: Frame) -> bool:
        """Return whether a module of it also ran in other frames of its microbatch, which may then share state."""
        return any(self._visits[module, frame.microbatch] > 1 for module in frame.executed)

    def keep(self, key: FrameKey, frame: Frame) -> None:
        """Keep a frame until its backward or close."""
        self._frames[key] = frame
        for module in frame.executed:
            self._visits[module, frame.microbatch] += 1

    def take(self, key: FrameKey) -> Frame:
        """Remove and return a frame."""
        return self._frames.pop(key)

    def leave(self, token: int, left: WeightGradients, place: int) -> None:
        """Keep weight gradients that a backward has deferred, and the place of that backward."""
        self._left[token] = left, place

    def take_left(self, token: int) -> tuple[WeightGradients, int]:
        """Remove and return deferred weight gradients, and the place of their backward in the microbatch."""
        return self._left.pop(token)

    def watch(self, microbatch: int, watched: Watched) -> None:
        """Detect writes to a tensor of which the requester has a copy, until the microbatch's backward."""
        self._watched.setdefault(microbatch, []).append(watched)

    def settle(self, microbatch: int) -> None:
        """Raise :class:`FrameError` if a watched tensor of the microbatch was written to."""
        for watched in self._watched.get(microbatch, ()):
            watched.check(microbatch)

    def forget_watched(self, microbatch: int) -> None:
        """Stop watching: the microbatch's backward has begun."""
        self._watched.pop(microbatch, None)

    def end_step(self) -> None:
        """Clear the table after the tasks of a step are over."""
        self.unclosed += len(self._frames)
        self.clear()

    def clear(self) -> None:
        """Clear the table at the end of a step."""
        self._frames.clear()
        self._visits.clear()
        self._watched.clear()
        self._left.clear()
