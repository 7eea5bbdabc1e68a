"""LAMB: Adam's update with a learning rate of its own for each parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardwright.errors import ConfigError
from shardwright.optimizers.layerwise import LayerwiseOptimizer


class FusedLamb(LayerwiseOptimizer):
    r"""LAMB (You et al., "Large Batch Optimization for Deep Learning", arXiv:1904.00962, algorithm 2).

    With the gradient g of a parameter x at its step t, element by element but for the norms:

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g^2 \\
        r_t &= \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} \\
        x_t &= x_{t-1} - \eta \frac{\lVert x_{t-1} \rVert}{\lVert r_t + \lambda x_{t-1} \rVert}
               (r_t + \lambda x_{t-1})

    where the ratio of norms is 1 if one of them is 0. First, all gradients are multiplied by
    ``max_grad_norm / norm`` if their norm over the whole model is larger.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        bias_correction: Divide the moments by ``1 - beta ** t``.
        betas: The decay of the two moments.
        eps: Added to the denominator.
        weight_decay: The weight decay.
        adam_w_mode: As above; False adds the decay to the gradient, and not to the update.
        grad_averaging: As above; False adds the whole gradient to the first moment.
        max_grad_norm: The maximum norm of the gradients; 0 does not clip.
        use_nvlamb: Use the ratio of norms also in groups without weight decay; False: 1 there.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        """Create it; see the class."""
        if not max_grad_norm >= 0:
            raise ConfigError(f"FusedLamb: max_grad_norm is {max_grad_norm!r}; allowed: 0 and positive numbers")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults)
        self._max_grad_norm = max_grad_norm

    def _update(self) -> None:
        factor = 1.0
        if self._max_grad_norm and (norm := self._global_norm()) > self._max_grad_norm:
            factor = self._max_grad_norm / norm
        groups: list[dict[str, Any]] = []
        parameters: list[torch.Tensor] = []
        directions: list[torch.Tensor] = []
        for group, of_kind, gradients in self._trained():
            groups += [group] * len(of_kind)
            parameters += of_kind
            directions += self._directions(group, of_kind, list(torch._foreach_mul(gradients, factor)))
        of_weights, of_directions = self._norms(parameters, parameters, directions)
        lengths = zip(groups, of_weights, of_directions, strict=True)
        if not parameters:
            return
        rates = [_rate(group, weight, direction) for group, weight, direction in lengths]
        torch._foreach_mul_(directions, self._spread(parameters, rates))
        torch._foreach_sub_(parameters, directions)

    def _directions(
        self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Update the moments, and return the direction of each parameter's update."""
        first, second = group["betas"]
        decay = group["weight_decay"]
        if decay and not group["adam_w_mode"]:
            torch._foreach_add_(gradients, parameters, alpha=decay)
        steps = self._next_steps(parameters)
        averages, squares = self._moment("exp_avg", parameters), self._moment("exp_avg_sq", parameters)
        torch._foreach_mul_(averages, first)
        torch._foreach_add_(averages, gradients, alpha=1 - first if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        corrects = group["bias_correction"]
        denominators = list(torch._foreach_sqrt(squares))
        torch._foreach_div_(denominators, [(1 - second**step) ** 0.5 if corrects else 1.0 for step in steps])
        torch._foreach_add_(denominators, group["eps"])
        directions = list(torch._foreach_div(averages, [1 - first**step if corrects else 1.0 for step in steps]))
        torch._foreach_div_(directions, denominators)
        if decay and group["adam_w_mode"]:
            torch._foreach_add_(directions, parameters, alpha=decay)
        return directions


def _rate(group: dict[str, Any], weight: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Return the learning rate of a parameter, given its norm and that of the direction of its update."""
    if not (group["weight_decay"] or group["use_nvlamb"]):
        return torch.full_like(weight, float(group["lr"]))
    ratio = torch.where((weight > 0) & (direction > 0), weight / direction, 1.0)
    return ratio * float(group["lr"])
