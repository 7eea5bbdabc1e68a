"""What came of a forward on the executing rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright import _core
from shardwright.execution.exchange import Returned
from shardwright.execution.layout import Layouts
from shardwright.frames.watch import TensorMemory, Watched


@dataclass(slots=True)
class Sent:
    """A tensor that crossed: does anything on this rank keep its memory after the call?

    Attributes:
        is_argument: Whether it is an argument; else a result.
        number: Its number among those.
        memory: Its memory.
        watched: What notices writes to it; None in inference mode.
    """

    is_argument: bool
    number: int
    memory: TensorMemory
    watched: Watched | None

    @staticmethod
    def of(number: int, tensor: torch.Tensor, module: str, *, is_argument: bool) -> Sent:
        """A tensor as an execution of a module got or gave it."""
        why = f"module {module!r} kept a tensor that it was given or returned"
        return Sent(is_argument, number, TensorMemory(tensor), None if tensor.is_inference() else Watched(tensor, why))


@dataclass(slots=True)
class Executed:
    """What came of a forward, without its tensors.

    Attributes:
        spec: The result.
        parts: Its tensors' bytes.
        returned: What is said of them.
        sent: The tensors that crossed, for whether anything keeps their memory.
        onward: Where the result goes to the next rank of a chain: as its argument, and what is noted of that.
    """

    spec: _core.Spec
    parts: _core.TensorParts
    returned: Returned
    sent: list[Sent]
    onward: Onward | None


@dataclass(slots=True)
class Onward:
    """A result on its way to the next rank of a chain.

    Attributes:
        spec: The arguments there.
        shared: Which of their tensors share memory.
        layouts: How those lie that are not dense.
    """

    spec: _core.Spec
    shared: list[list[int]]
    layouts: Layouts

    def noted(self, kept: list[int]) -> _core.ArgumentNotes:
        """What is noted of the arguments, of which this rank keeps some."""
        return _core.ArgumentNotes(
            shared=self.shared,
            strides=self.layouts.strides,
            overlapping=self.layouts.overlapping,
            relaid=self.layouts.relaid,
            private=True,
            kept=kept,
        )


def sent_by(module: str, given: list[torch.Tensor], returned: Returned) -> list[Sent]:
    """The tensors that crossed for an execution of a module: its arguments, and the results that are sent."""
    sent = [Sent.of(index, tensor, module, is_argument=True) for index, tensor in enumerate(given)]
    for place, tensor in enumerate(returned.tensors):
        if place not in returned.recipes:
            sent.append(Sent.of(place, tensor, module, is_argument=False))
    return sent
