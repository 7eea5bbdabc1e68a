"""What came of a forward on the executing rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwright import _core
from shardwright.execution.exchange import Returned
from shardwright.execution.layout import Layouts
from shardwright.frames.watch import RemoteMemory, Watched, kept_by_others


@dataclass(slots=True)
class Sent:
    """A tensor that crossed: does anything on this rank keep its memory after the call?

    Attributes:
        is_argument: Whether it is an argument; else a result.
        number: Its number among those.
        alias: A tensor of the same memory and version, without its graph.
    """

    is_argument: bool
    number: int
    alias: torch.Tensor


def kept_after(module: str, sent: Sequence[Sent], elsewhere: RemoteMemory) -> list[tuple[Sent, Watched | None]]:
    """Of the tensors that crossed for a module those whose memory is kept, once its call has let them go.

    Returns:
        Each with what notices writes to it; None in inference mode.
    """
    kept = []
    for one, is_kept in zip(sent, kept_by_others([one.alias for one in sent], elsewhere), strict=True):
        if is_kept:
            why = f"module {module!r} kept a tensor that it was given or returned"
            kept.append((one, None if one.alias.is_inference() else Watched(one.alias, why)))
    return kept


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


def sent_by(given: list[torch.Tensor], returned: Returned) -> list[Sent]:
    """The tensors that crossed for an execution: its arguments, and the results that are sent."""
    sent = [Sent(True, index, tensor.detach()) for index, tensor in enumerate(given)]
    for place, tensor in enumerate(returned.tensors):
        if place not in returned.recipes:
            sent.append(Sent(False, place, tensor.detach()))
    return sent
