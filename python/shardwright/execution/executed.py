"""The outcome of a forward on the executing rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwright import _core
from shardwright.frames.watch import RemoteMemory, Watched, kept_by_others


@dataclass(slots=True)
class Executed:
    """The outcome of a forward, without references to its tensors.

    Attributes:
        spec: The structure of the result.
        parts: The bytes of the result's tensors.
        notes: What is said of them, as keyword arguments of :class:`shardwright._core.ResultNotes`.
        aliases: Detached tensors that share memory and version with the arguments, then with the results sent.
        sent: The numbers of those results.
        onward: The structure of the arguments of the next rank of a chain, to which the result is sent, and what is
            said of their tensors, as keyword arguments of :class:`shardwright._core.ArgumentNotes`; None if it returns
            to the caller.
    """

    spec: _core.Spec
    parts: _core.TensorParts
    notes: dict[str, Any]
    aliases: list[torch.Tensor]
    sent: list[int]
    onward: tuple[_core.Spec, dict[str, Any]] | None

    def settle(self, module: str, elsewhere: RemoteMemory) -> list[Watched]:
        """Note whose memory is still referenced, after the call has released its own references.

        Returns:
            For each of those tensors that is not an inference tensor, a detector of writes to it.
        """
        watched = []
        num_arguments = len(self.aliases) - len(self.sent)
        for number in kept_by_others(self.aliases, elsewhere):
            if number < num_arguments:
                self.notes.setdefault("kept_arguments", []).append(number)
            else:
                self.notes.setdefault("kept_results", []).append(self.sent[number - num_arguments])
            if not self.aliases[number].is_inference():
                why = f"module {module!r} kept a tensor that it was given or returned"
                watched.append(Watched(self.aliases[number], why))
        self.aliases.clear()
        return watched
