"""Megatron's split, written by hand with ``torch.distributed`` and nothing of the library."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benches.tensor_parallel.model import COLUMNS, ROWS, Block, Model, State, plain_body, plain_state
from benches.tensor_parallel.torch_side import TorchSide


class _SumGradients(torch.autograd.Function):
    """The identity; backward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Sum(torch.autograd.Function):
    """The sum over ranks; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Columns(nn.Module):
    """A linear layer with this rank's slice of output channels."""

    def __init__(self, whole: nn.Linear) -> None:
        """Take the slice."""
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(size)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(size)[rank].clone())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """From [..., all channels] this rank's."""
        return nn.functional.linear(_SumGradients.apply(input), self.weight, self.bias)  # type: ignore[no-untyped-call]


class Rows(nn.Module):
    """A linear layer with this rank's slice of input channels."""

    def __init__(self, whole: nn.Linear) -> None:
        """Take the slice; the bias is whole on every rank."""
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """From this rank's channels [..., all channels]."""
        summed: torch.Tensor = _Sum.apply(nn.functional.linear(input, self.weight))  # type: ignore[no-untyped-call]
        return summed + self.bias


class ByHand(TorchSide):
    """See :class:`benches.tensor_parallel.rank.Side`."""

    def __init__(self, weights: State) -> None:
        """Divide the blocks of the whole model."""
        dist.init_process_group("gloo")
        self.model = Model(plain_body())
        self.model.load_state_dict(plain_state(weights))
        for block in self.model.body.children():
            assert isinstance(block, Block)
            for names, kind in ((COLUMNS, Columns), (ROWS, Rows)):
                for name in names:
                    parent, _, last = name.rpartition(".")
                    setattr(block.get_submodule(parent), last, kind(block.get_submodule(name)))  # type: ignore[arg-type]

    def gradients(self, expected: State) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Names, gradients and what they have to be, of this rank's parameters."""
        rank, size, right = dist.get_rank(), dist.get_world_size(), plain_state(expected)
        found = []
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            slices = [right[name].chunk(size, dim)[rank] for dim in range(right[name].dim())]
            like = next(one for one in (right[name], *slices) if one.shape == parameter.shape)
            found.append((name, parameter.grad, like))
        return found
