"""Optimizers of programs. Small errors of gradients stay small in all of them, and no update is large."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from shardwright.optimizers import FusedLamb


def update(parameter: torch.Tensor, gradient: torch.Tensor, elementwise: bool) -> None:
    """Change a weight by its gradient, by no more than a little, and in a way that leaves small errors small.

    With ``elementwise`` the change of an element depends on nothing but its own gradient.
    """
    with torch.no_grad():
        if gradient.numel():
            gradient = gradient / (1 + (gradient.abs() if elementwise else gradient.abs().max()))
        parameter.sub_(0.05 * gradient)


class _Each(torch.optim.Optimizer):
    """Updates one parameter after the other."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
        """Update a parameter."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update weights."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter, parameter.grad, self.state[parameter])


class Updating(_Each):
    """:func:`update` as an optimizer, for elements."""

    #: So that ranks have parts of parameters.
    updates_elements_independently = True

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
        """Update a parameter."""
        update(parameter, gradient, elementwise=True)


class Lars(_Each):
    """A rate for each parameter, by its norm and its gradient's, with momentum."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
        """Update a parameter."""
        norm = parameter.norm()
        new = gradient * (0.05 * norm / (1 + norm + gradient.norm()))
        state["buffer"] = 0.5 * state["buffer"] + new if "buffer" in state else new
        parameter.sub_(state["buffer"])


class Lamb(_Each):
    """Adam's update, with decay, by the norm of the parameter over its own."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
        """Update a parameter."""
        for name, value in (("first", gradient), ("second", gradient.square())):
            state[name] = 0.8 * state[name] + 0.2 * value if name in state else 0.2 * value
        new = state["first"] / (state["second"].sqrt() + 0.1) + 0.1 * parameter
        parameter.sub_(new, alpha=0.05 * float((parameter.norm() + 0.1) / (new.norm() + 0.1)))


class Muon(_Each):
    """Momentum, orthogonalized as a matrix by a few steps of Newton and Schulz."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
        """Update a parameter."""
        state["buffer"] = 0.5 * state["buffer"] + gradient if "buffer" in state else gradient.clone()
        rows = state["buffer"].reshape(len(gradient) if gradient.dim() > 1 else 1, -1)
        rows = rows / (1 + rows.norm())
        for _ in range(3):
            rows = 1.5 * rows - 0.5 * rows @ rows.T @ rows
        parameter.sub_(rows.reshape(parameter.shape), alpha=0.05)


class Rows(_Each):
    """A script's own: a statistic for each row, decay by the largest weight, and a rate by the shape."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
        """Update a parameter."""
        count = gradient.shape[0] if gradient.dim() else 1
        rows = gradient.square().reshape(count, -1).mean(1)
        state["rows"] = 0.8 * state["rows"] + 0.2 * rows if "rows" in state else rows
        scaled = gradient / (state["rows"].sqrt() + 0.1).reshape([-1] + [1] * (gradient.dim() - 1) if count > 1 else [])
        parameter.sub_(scaled.tanh() + 0.01 * parameter.abs().max(), alpha=0.05 / count**0.5)


Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
#: By element: these update parts of parameters as they update parameters.
BY_ELEMENT: dict[str, Make] = {
    "updating": Updating,
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, eps=0.1, weight_decay=0.1),
}
#: They look at whole parameters, or at all of them.
BY_PARAMETER: dict[str, Make] = {
    "lars": Lars,
    "lamb": Lamb,
    "muon": Muon,
    "rows": Rows,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.02, eps=(0.1, 1e-3)),
    "fused_lamb": lambda parameters: FusedLamb(parameters, lr=0.02, eps=0.1, weight_decay=0.1),
}
OPTIMIZERS: dict[str, Make] = BY_ELEMENT | BY_PARAMETER
