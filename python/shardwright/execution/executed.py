"""The outcome of a forward on the executing rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright import _core
from shardwright.execution.exchange import Left, Returned
from shardwright.execution.layout import Layouts
from shardwright.frames.watch import RemoteMemory, Watched, kept_by_others


@dataclass(slots=True)
class Sent:
    """The tensors that were sent between ranks for an execution, to find out whether this rank keeps their memory.

    Attributes:
        aliases: Detached tensors that share memory and version with the arguments, then with the results sent.
        results: The numbers of those results.
    """

    aliases: list[torch.Tensor]
    results: list[int]

    @staticmethod
    def of(given: list[torch.Tensor], returned: Returned) -> Sent:
        """Create it from the arguments of an execution and the results that are sent."""
        sent = Sent([tensor.detach() for tensor in given], [])
        for place, tensor in enumerate(returned.tensors):
            if place not in returned.recipes:
                sent.aliases.append(tensor.detach())
                sent.results.append(place)
        return sent

    def settle(self, module: str, elsewhere: RemoteMemory, left: Left) -> list[Watched]:
        """Record in ``left`` whose memory is still referenced, after the call has released its own references.

        Returns:
            For each of those tensors that is not an inference tensor, a detector of writes to it.
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
    """The outcome of a forward, without references to its tensors.

    Attributes:
        spec: The structure of the result.
        parts: The bytes of the result's tensors.
        returned: How those tensors relate to the arguments and to each other.
        sent: The tensors that were sent between ranks, to find out whether their memory is kept.
        onward: The result as an argument of the next rank of a chain; None if it returns to the caller.
    """

    spec: _core.Spec
    parts: _core.TensorParts
    returned: Returned
    sent: Sent
    onward: Onward | None


@dataclass(slots=True)
class Onward:
    """A result that is sent to the next rank of a chain.

    Attributes:
        spec: The structure of the arguments there.
        shared: The groups of their tensors that share memory.
        layouts: The layouts of the tensors that are not dense.
    """

    spec: _core.Spec
    shared: list[list[int]]
    layouts: Layouts

    def noted(self, kept: list[int]) -> _core.ArgumentNotes:
        """Return the notes on the arguments, given the indices of those that this rank keeps."""
        return _core.ArgumentNotes(
            shared=self.shared,
            strides=self.layouts.strides,
            overlapping=self.layouts.overlapping,
            relaid=self.layouts.relaid,
            private=True,
            kept=kept,
        )
