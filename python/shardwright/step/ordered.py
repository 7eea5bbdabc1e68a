"""Gradients summed in one order, whatever the order in which requests come in (``deterministic_server``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from shardwright.execution.turn import Turn

#: A task's place in the step, which no timing changes: its microbatch, and where in it the module was called.
TaskPlace = tuple[int, int]


class OrderedGradients:
    """Keeps what each task adds to a parameter's gradient apart until the step ends.

    Floating-point sums depend on their order, and which of two requests a rank serves first depends on timing. So the
    sums are made at the end, by microbatch and place. Until then there is a gradient for each microbatch.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], turn: Turn) -> None:
        """Begin to listen to the parameters that need a gradient."""
        self._turn = turn
        self._parts: dict[nn.Parameter, dict[TaskPlace, torch.Tensor]] = {}
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def __call__(self, parameter: nn.Parameter) -> None:
        """A task has added to the parameter's gradient: put it aside."""
        gradient, parameter.grad = parameter.grad, None
        task = self._turn.current
        assert gradient is not None, "it was just accumulated"
        assert task is not None, "only tasks run backward in a step"
        parts = self._parts.setdefault(parameter, {})
        place = (task.microbatch, task.place)
        parts[place] = parts[place] + gradient if place in parts else gradient

    def finish(self) -> None:
        """Leave each parameter the sum."""
        for parameter, parts in self._parts.items():
            _, *others = places = sorted(parts)
            total = parts[places[0]]
            for place in others:
                total = total + parts[place]
            parameter.grad = total
        self.stop()

    def stop(self) -> None:
        """Listen no more, and forget what was put aside."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._parts.clear()
