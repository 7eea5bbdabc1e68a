"""A block of two parallel linears whose activations are sliced along a sequence, asynchronous or not."""

from __future__ import annotations

import shardwright as smp
import torch
from torch import nn

from benches.tensor_parallel.model import INTERMEDIATE, MICROBATCHES, SEQUENCE, WIDTH

BATCH = 16 // MICROBATCHES
KINDS = ("plain", "asynchronous")


class Sequences:
    """Both kinds, with the same weights and the same input."""

    def __init__(self) -> None:
        """On the library's TP_GROUP."""
        smp.init(tensor_parallel_degree=2, ddp=True)
        self._blocks = {}
        for kind in KINDS:
            torch.manual_seed(0)
            keys = {"sequence_dim": 1, "asynchronous": kind == "asynchronous"}
            first = smp.nn.ColumnParallelLinear(WIDTH, INTERMEDIATE, **keys)
            last = smp.nn.RowParallelLinear(INTERMEDIATE, WIDTH, **keys)
            self._blocks[kind] = nn.Sequential(first, nn.GELU(approximate="tanh"), last)
        torch.manual_seed(1 + smp.tp_rank())
        self._input = torch.randn(BATCH, SEQUENCE // 2, WIDTH)

    def passes(self, kind: str, number: int) -> None:
        """Forward and backward, several times."""
        for _ in range(number):
            self._once(kind)

    def _once(self, kind: str) -> list[torch.Tensor]:
        block, input = self._blocks[kind], self._input.detach().requires_grad_()
        block.zero_grad()
        output = block(input)
        output.backward(self._input)
        assert input.grad is not None
        return [output.detach(), input.grad, *(one.grad for one in block.parameters() if one.grad is not None)]

    def difference(self) -> float:
        """The largest relative difference between outputs and gradients of both kinds."""
        one, other = (self._once(kind) for kind in KINDS)
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))

    def barrier(self) -> None:
        """Wait for the other rank."""
        smp.barrier()

    def close(self) -> None:
        """Leave."""
        smp.shutdown()
