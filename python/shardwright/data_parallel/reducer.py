"""Averaging gradients over the data-parallel group, in buckets of a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(slots=True)
class _Bucket:
    parameters: list[nn.Parameter]
    flat: torch.Tensor | None = None
    work: Any = None


class Reducer:
    """Averages the gradients of one rank's parameters over its data-parallel group.

    A parameter without a gradient on this rank contributes zero, as long as any rank has one; one without a
    gradient anywhere keeps none. Buckets hold parameters of one dtype in the model's reversed order, so every rank
    reduces the same buckets in the same order whatever it ran.
    """

    def __init__(self, group: Any, size: int, bucket_bytes: int, wait: Callable[[Any], None]) -> None:
        """Make a reducer.

        Args:
            group: The data-parallel process group.
            size: Its number of ranks.
            bucket_bytes: How large a bucket may get.
            wait: Waits for a collective, watching for a failure elsewhere.
        """
        self._group = group
        self._size = size
        self._bucket_bytes = bucket_bytes
        self._wait = wait

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average ``.grad`` of the parameters, in place."""
        wanted = [parameter for parameter in parameters if parameter.requires_grad or parameter.grad is not None]
        if not wanted:
            return
        used = torch.tensor([p.grad is not None for p in wanted], dtype=torch.uint8, device=wanted[0].device)
        self._wait(dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
        reduced = [p for p, anywhere in zip(wanted, used.tolist(), strict=True) if anywhere]
        buckets = self._buckets(reduced)
        for bucket in buckets:
            gradients = [_dense(p) for p in bucket.parameters]
            bucket.flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        for bucket in buckets:
            self._wait(bucket.work)
            assert bucket.flat is not None, "set when the bucket was sent"
            offset = 0
            bucket.flat.div_(self._size)
            for parameter in bucket.parameters:
                part = bucket.flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
                offset += parameter.numel()
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = part.clone()
                else:
                    parameter.grad.copy_(part)

    def _buckets(self, parameters: list[nn.Parameter]) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        open_buckets: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
        filled: dict[tuple[torch.dtype, torch.device], int] = {}
        for parameter in reversed(parameters):
            kind = (parameter.dtype, parameter.device)
            size = parameter.numel() * parameter.element_size()
            if kind not in open_buckets or filled[kind] + size > self._bucket_bytes:
                open_buckets[kind] = _Bucket([])
                filled[kind] = 0
                buckets.append(open_buckets[kind])
            open_buckets[kind].parameters.append(parameter)
            filled[kind] += size
        return buckets


def _dense(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient
