"""Sums gradients in a fixed order, independent of the order of requests (``deterministic_server``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwright.execution.turn import Turn

#: A task's place in the step, independent of timing: its microbatch, and the place of the module's call in it.
TaskPlace = tuple[int, int]


class OrderedGradients:
    """Keeps the contribution of each task to a parameter's gradient separate until the step ends.

    Floating-point sums depend on the order of the addends, and timing determines which of two requests a rank serves
    first. The sums are therefore computed at the end, ordered by microbatch and place. Until then there is a gradient
    for each task's place.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], turn: Turn) -> None:
        """Register hooks on the parameters that require a gradient."""
        self._turn = turn
        self._parts: dict[nn.Parameter, dict[TaskPlace, torch.Tensor]] = {}
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def __call__(self, parameter: nn.Parameter) -> None:
        """Store the gradient that a task has added to the parameter, and clear the parameter's gradient."""
        gradient, parameter.grad = parameter.grad, None
        task = self._turn.current
        assert gradient is not None, "it was just accumulated"
        assert task is not None, "only tasks run backward in a step"
        parts = self._parts.setdefault(parameter, {})
        place = (task.microbatch, task.place)
        parts[place] = parts[place] + gradient if place in parts else gradient

    def finish(self) -> None:
        """Set each parameter's gradient to the sum."""
        for parameter, parts in self._parts.items():
            _, *others = places = sorted(parts)
            total = parts[places[0]]
            for place in others:
                total = total + parts[place]
            parameter.grad = total
        self.stop()

    def stop(self) -> None:
        """Remove the hooks, and discard the stored gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._parts.clear()
