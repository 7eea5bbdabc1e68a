"""A request as the execution server would hand it to Python."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright import _core


@dataclass
class FakeRequest:
    """What the execution server hands to Python, with the fields that the executing side reads."""

    id: int
    to: int
    requester: int
    place: _core.Place
    asked: _core.ForwardCall | _core.BackwardCall
    spec: _core.Spec | None
    parts: _core.TensorParts
    hold: bool = False

    @property
    def kind(self) -> str:
        """What is asked for."""
        if isinstance(self.asked, _core.ForwardCall):
            return "forward"
        return "backward" if self.asked.gradients else "close"

    @property
    def forward(self) -> _core.ForwardCall:
        """What a forward request asks for."""
        assert isinstance(self.asked, _core.ForwardCall)
        return self.asked

    @property
    def backward(self) -> _core.BackwardCall:
        """What a backward request or a close asks for."""
        assert isinstance(self.asked, _core.BackwardCall)
        return self.asked

    @property
    def model(self) -> int:
        """The model."""
        return self.place.model

    @property
    def module(self) -> int:
        """The module."""
        return self.asked.module

    @property
    def microbatch(self) -> int:
        """The microbatch."""
        return self.place.microbatch
