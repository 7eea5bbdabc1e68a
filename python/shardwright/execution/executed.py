"""What came of a forward on the executing rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright import _core
from shardwright.execution.exchange import Left, Returned
from shardwright.execution.layout import Layouts
from shardwright.frames.watch import RemoteMemory, Watched, kept_by_others


@dataclass(slots=True)
class Sent:
    """The tensors that crossed for an execution: does anything on this rank keep their memory after the call?

    Attributes:
        aliases: Tensors of the same memory and version, without their graphs: of the arguments, then of results.
        results: The numbers of those results.
    """

    aliases: list[torch.Tensor]
    results: list[int]

    @staticmethod
    def of(given: list[torch.Tensor], returned: Returned) -> Sent:
        """The arguments of an execution, and the results that are sent."""
        sent = Sent([tensor.detach() for tensor in given], [])
        for place, tensor in enumerate(returned.tensors):
            if place not in returned.recipes:
                sent.aliases.append(tensor.detach())
                sent.results.append(place)
        return sent

    def settle(self, module: str, elsewhere: RemoteMemory, left: Left) -> list[Watched]:
        """Once the call has let them go: note whose memory is kept.

        Returns:
            What notices writes to those; none in inference mode.
        """
        watched = []
        num_arguments = len(self.aliases) - len(self.results)
        for number in kept_by_others(self.aliases, elsewhere):
            if number < num_arguments:
                left.kept_arguments.append(number)
            else:
                left.kept_results.append(self.results[number - num_arguments])
            if not self.aliases[number].is_inference():
                why = f"module {module!r} kept a tensor that it was given or returned"
                watched.append(Watched(self.aliases[number], why))
        self.aliases.clear()
        return watched


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
    sent: Sent
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
