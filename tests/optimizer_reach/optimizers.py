"""Optimizers that look at whole parameters, or at several, as a script may have its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from shardwright.optimizers import FusedLamb, FusedNovoGrad
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


class Unseen(Optimizer):
    """A rule that looks at whole parameters where a trial on small tensors cannot see it."""

    def __init__(self, params: Iterable[Any], when: str) -> None:
        super().__init__(params, {"lr": 0.05, "trust": 0.5})
        self.when = when

    def _is_on(self, one: torch.Tensor, group: dict[str, Any]) -> bool:
        return {
            "late": self.state[one]["step"] > 8,
            "large": one.numel() > 40 and tuple(one.shape) != (136, 132),
            "switched": group["trust"] > 2,
            "attribute": getattr(one, "scaled_by", 0.0) > 0,
        }[self.when]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                self.state[one]["step"] = self.state[one].get("step", 0) + 1
                update = 0.01 * one.grad
                if self._is_on(one, group):
                    update = one.grad * (0.02 * one.norm() / (one.grad.norm() + 1e-9)) * getattr(one, "scaled_by", 1.0)
                one.sub_(update, alpha=group["lr"])


class Declared(Mine):
    """Has a step of its own, which updates each element by itself, and says so."""

    updates_elements_independently = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.sub_(one.grad.sign(), alpha=1e-3)


class Wrongly(Lars):
    """Says what is not so."""

    updates_elements_independently = True

    @torch.no_grad()
    def step(self) -> None:
        super().step()


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
    "late": lambda params: Unseen(params, "late"),
    "large": lambda params: Unseen(params, "large"),
    "switched": lambda params: Unseen(params, "switched"),
    "attribute": lambda params: Unseen(params, "attribute"),
    "declared": lambda params: Declared(params, lr=0.01),
    "wrongly": Wrongly,
    "fused-lamb": lambda params: FusedLamb(params, lr=0.01, max_grad_norm=0.0),
    "fused-novograd": lambda params: FusedNovoGrad(params, lr=0.01),
    "lbfgs": lambda params: torch.optim.LBFGS(params),
}
