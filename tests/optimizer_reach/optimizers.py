"""Optimizers that look at whole parameters, or at several, as a script may have its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from transformers.optimization import Adafactor

Make = Callable[[Iterable[Any]], Optimizer]


class Lars(Optimizer):
    """Layer-wise adaptive rate scaling with momentum, as scripts have it by hand."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                update = one.grad * (0.02 * one.norm() / (one.grad.norm() + 1e-9))
                state["buffer"] = group["momentum"] * state.get("buffer", torch.zeros_like(one)) + update
                one.sub_(state["buffer"], alpha=group["lr"])


class Rows(Optimizer):
    """A statistic for each row, decay by the largest weight, and a rate by the shape."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                rows = one.grad.square().reshape(one.shape[0], -1).mean(1)
                state = self.state[one]
                state["rows"] = 0.9 * state["rows"] + 0.1 * rows if "rows" in state else rows
                scaled = one.grad / (state["rows"].sqrt() + 1e-8).view(-1, *[1] * (one.dim() - 1))
                one.sub_(scaled + 0.01 * one.abs().max(), alpha=group["lr"] / one.shape[0] ** 0.5)


class Preconditioned(Optimizer):
    """A matrix over the rows of each parameter, as Shampoo has it, kept in a list of its own."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                gradient = one.grad.reshape(one.shape[0], -1)
                state = self.state[one]
                state["sums"] = [state.get("sums", [1e-3 * torch.eye(len(gradient))])[0] + gradient @ gradient.T]
                values, vectors = torch.linalg.eigh(state["sums"][0])
                root = vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T
                one.sub_((root @ gradient).view_as(one), alpha=group["lr"])


class Clipped(torch.optim.AdamW):
    """AdamW behind a norm over all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in every]).norm()
        for one in every:
            one.grad.mul_(torch.clamp(0.01 / norm, max=1.0))
        return super().step(closure)


class Mine(torch.optim.Adam):
    """Does what its base does."""


class Noisy(torch.optim.SGD):
    """Adds noise to gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.grad.add_(torch.randn_like(one))
        return super().step(closure)


class Keeps(Optimizer):
    """Keeps to the list of parameters that it was made with."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.all = [one for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self) -> None:
        for one in self.all:
            if one.grad is not None:
                one.sub_(one.grad / one.grad.norm(), alpha=self.defaults["lr"])


OPTIMIZERS: dict[str, Make] = {
    "muon": lambda params: torch.optim.Muon(params, lr=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "transformers-adafactor": lambda params: Adafactor(params),
    "transformers-adafactor-momentum": lambda params: Adafactor(params, lr=1e-2, relative_step=False, beta1=0.9),
    "lars": Lars,
    "rows": Rows,
    "preconditioned": Preconditioned,
    "clipped": lambda params: Clipped(params, lr=0.01),
    "mine": lambda params: Mine(params, lr=0.01),
    "noisy": lambda params: Noisy(params, lr=0.01),
    "keeps": Keeps,
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "lbfgs": lambda params: torch.optim.LBFGS(params),
}
