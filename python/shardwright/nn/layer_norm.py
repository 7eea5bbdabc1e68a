"""Normalization over channels that are divided over tp ranks (paper, appendix F.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.nn.gathered import LayerInputs, enter
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.module import DistributedModule, Placed
from shardwright.tensor_parallel.sharding import Sharding

_HALF = (torch.float16, torch.bfloat16)


class DistributedLayerNorm(DistributedModule):
    """Layer normalization over the last dim (paper, appendix F.2).

    Optimized for memory, tp rank i has the i-th slice of the channels, and of weight and bias. Each rank computes the
    moments of its slice, one all-reduce sums them, and each rank normalizes its slice; the backward all-reduces two
    numbers per token as well. Optimized for speed, or on one rank, activations and parameters are whole, and nothing
    is sent.

    Attributes:
        weight: [channels], or [channels / tp degree] for memory; None without ``elementwise_affine``.
        bias: The bias, of the same shape; None without one.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    #: Whether the mean is subtracted.
    _centered = True

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        inside: bool = False,
        **place: Unpack[Placed],
    ) -> None:
        """Create a layer with a weight of one and a bias of zero.

        Args:
            normalized_shape: The number of channels of the whole layer.
            eps: Added to the variance.
            elementwise_affine: Whether it has a weight.
            bias: Whether it has a bias too.
            inside: Whether it is part of another distributed module, which has gathered the samples.
            **place: Arguments of ``Placed``: ``group``, ``device``, ``dtype``.
        """
        super().__init__(**place)
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1:
            raise ConfigError(f"{type(self).__name__}: normalized_shape is {list(shape)}; allowed: one dim")
        self.normalized_shape = shape
        self.eps = eps
        self.inside = inside
        self.divides = self.tp_group.optimize == "memory" and self.tp_group.size > 1
        if self.divides:
            sharding = Sharding(dim=0)
            sharding.check(f"{type(self).__name__}.weight", shape, self.tp_group.size)
        else:
            sharding = Sharding(scaled_batch=inside or self.tp_group.prescaled_batch)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if elementwise_affine:
            self.make_parameter("weight", shape, sharding, nn.init.ones_)
            if bias and self._centered:
                self.make_parameter("bias", shape, sharding, nn.init.zeros_)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize; all ranks of the group must call it together.

        Args:
            input: [batch, ..., channels], floating; inside another distributed module, in the layout that it gathers.

        Returns:
            A tensor of the same shape and dtype. Half precision is normalized in single precision.
        """
        if self.divides and not self.inside:
            call = enter(self, LayerInputs(input), self.normalized_shape[0])
            return call.leave(self._normalized(call.inputs.hidden))
        return self._normalized(input)

    def _normalized(self, input: torch.Tensor) -> torch.Tensor:
        if self.divides:
            output: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
                input, self.weight, self.bias, self.eps, self._centered, self.tp_group
            )
            return output
        if self._centered:
            return nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return nn.functional.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return the arguments shown in the module's ``repr``."""
        return f"{self.normalized_shape[0]}, eps={self.eps}, tp_degree={self.tp_group.size}"


class DistributedRMSNorm(DistributedLayerNorm):
    """Root mean square normalization over the last dim, without bias, divided like :class:`DistributedLayerNorm`."""

    _centered = False


class FusedLayerNorm(nn.LayerNorm):
    """Layer normalization in one kernel, which is torch's own; it is not divided over tp ranks."""


def make_norm(kind: str, channels: int, eps: float, place: Placed) -> DistributedLayerNorm:
    """Create a normalization inside another distributed module: ``"layer_norm"`` or ``"rms_norm"``."""
    kinds = {"layer_norm": DistributedLayerNorm, "rms_norm": DistributedRMSNorm}
    if kind not in kinds:
        raise ConfigError(f"normalization is {kind!r}; allowed: {', '.join(map(repr, kinds))}")
    return kinds[kind](channels, eps, inside=True, **place)


class _Normalize(torch.autograd.Function):
    """Normalize this rank's slice of the channels; the input and two numbers per token are kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        centered: bool,
        group: TensorGroup,
    ) -> torch.Tensor:
        wide = _wide(input)
        channels, whole = wide.shape[-1], wide.shape[-1] * group.size
        # Deviations are squared within the slice, and slices are combined in double precision, so that the difference
        # of the moments of the whole loses no digits of single precision.
        if centered:
            mean = wide.mean(-1, keepdim=True)
            variance = (wide - mean).square().mean(-1, keepdim=True).double()
            mean = mean.double()
            moments = torch.stack([mean * channels, (variance + mean.square()) * channels])
            total, squares = group.all_reduce([moments])[0].div_(whole).unbind(0)
            variance = (squares - total.square()).clamp_(min=0)
            wide = wide - total.to(wide.dtype)
        else:
            moments = wide.square().sum(-1, keepdim=True, dtype=torch.float64)
            variance = group.all_reduce([moments])[0].div_(whole)
            total = None
        scale = (variance + eps).rsqrt_().to(wide.dtype)
        normalized = wide * scale
        ctx.save_for_backward(input, weight, scale, None if total is None else total.to(wide.dtype))
        ctx.group, ctx.whole = group, whole
        ctx.bias_dtype = None if bias is None else bias.dtype
        output = normalized if weight is None else normalized * weight
        return (output if bias is None else output + bias).to(input.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, scale, mean = ctx.saved_tensors
        wide = _wide(input)
        normalized = (wide if mean is None else wide - mean) * scale
        gradient = gradient.to(wide.dtype)
        of_bias = of_weight = of_input = None
        if ctx.needs_input_grad[2]:
            of_bias = gradient.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normalized).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            direct = gradient if weight is None else gradient * weight
            projections = [(direct * normalized).sum(-1, keepdim=True)]
            if mean is not None:
                projections.append(direct.sum(-1, keepdim=True))
            sums = ctx.group.all_reduce([torch.stack(projections)])[0].div_(ctx.whole).unbind(0)
            of_input = direct - normalized * sums[0]
            if mean is not None:
                of_input = of_input - sums[1]
            of_input = (of_input * scale).to(input.dtype)
        return of_input, of_weight, of_bias, None, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
