"""NovoGrad: gradients divided by a running average of their norm, one for each parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardwright.optimizers.layerwise import LayerwiseOptimizer


class FusedNovoGrad(LayerwiseOptimizer):
    r"""NovoGrad (Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", arXiv:1905.11286).

    With the gradient g of a parameter w at its step t (algorithm 1):

    .. math::
        v_1 &= \lVert g_1 \rVert^2 \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) \lVert g_t \rVert^2 \\
        m_t &= \beta_1 m_{t-1} + \left( \frac{g_t}{\sqrt{v_t} + \epsilon} + \lambda w_{t-1} \right) \qquad m_0 = 0 \\
        w_t &= w_{t-1} - \eta m_t

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        betas: The decay of the two moments.
        eps: Added to the denominator.
        weight_decay: The weight decay.
        grad_averaging: Multiply what is added to the first moment by ``1 - beta_1``.
        init_zero: Begin with ``v_0 = 0`` in place of the first gradient's norm.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
        init_zero: bool = False,
    ) -> None:
        """Create it; see the class."""
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)

    def _update(self) -> None:
        trained = list(self._trained())
        every = [parameter for _, parameters, _ in trained for parameter in parameters]
        (norms,) = self._norms(every, [gradient for _, _, gradients in trained for gradient in gradients])
        norm_of = {id(parameter): norm for parameter, norm in zip(every, norms, strict=True)}
        for group, parameters, gradients in trained:
            lengths = [self._length(group, parameter, norm_of[id(parameter)]) for parameter in parameters]
            lengths = self._spread(parameters, lengths)
            directions = list(torch._foreach_div(gradients, torch._foreach_add(lengths, group["eps"])))
            if group["weight_decay"]:
                torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
            first = group["betas"][0]
            averages = self._moment("exp_avg", parameters)
            torch._foreach_mul_(averages, first)
            torch._foreach_add_(averages, directions, alpha=1 - first if group["grad_averaging"] else 1.0)
            torch._foreach_add_(parameters, averages, alpha=-float(group["lr"]))

    def _length(self, group: dict[str, Any], parameter: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Update the second moment of a parameter, and return its square root."""
        state, second = self.state[parameter], group["betas"][1]
        if "norm_sq" not in state:
            state["norm_sq"] = torch.zeros_like(norm) if group["init_zero"] else norm.square()
            if not group["init_zero"]:
                return norm
        state["norm_sq"] = second * state["norm_sq"] + (1 - second) * norm.square()
        square: torch.Tensor = state["norm_sq"]
        return square.sqrt()
