"""Adam and AdamW by PyTorch's fused kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Adam):
    """``torch.optim.AdamW``, or ``torch.optim.Adam``, with ``fused=True``.

    Args:
        params: The parameters, dense and floating-point, or groups of them.
        lr: The learning rate.
        betas: The decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: The weight decay.
        adam_w_mode: Decay weights directly, as AdamW; False adds the decay to the gradient.
        amsgrad: Use the maximum of the second moment so far.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        amsgrad: bool = False,
    ) -> None:
        """Create it; see the class."""
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, fused=True, decoupled_weight_decay=adam_w_mode)
