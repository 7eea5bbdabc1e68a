"""Gradient buckets: parameters of one dtype whose gradients are reduced by one collective."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.data_parallel.collectives import Collectives
from shardwright.half_precision import gradient_dtype


class GradBucket:
    """A bucket of gradients, summed over microbatches, as passed to communication hooks."""

    def __init__(self, index: int, parameters: list[nn.Parameter], is_last: bool) -> None:
        """Create an empty bucket for parameters of one dtype on one device."""
        self._index = index
        self._parameters = parameters
        self._is_last = is_last
        self._flat: torch.Tensor | None = None
        #: The collective in flight, or a hook's future.
        self.work: Any = None
        #: Parameters that got a gradient after the bucket was sent.
        self.late = False

    def index(self) -> int:
        """Return the index of the bucket in the fixed order of buckets."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return the gradients as a 1-D tensor."""
        assert self._flat is not None, "a bucket is filled before anyone sees it"
        return self._flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the tensor of gradients."""
        self._flat = buffer

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, in the order of their gradients in the buffer."""
        return list(self._parameters)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients as views of the buffer, in the shapes of the parameters."""
        views, offset = [], 0
        for parameter in self._parameters:
            views.append(self.buffer().narrow(0, offset, parameter.numel()).view(parameter.shape))
            offset += parameter.numel()
        return views

    def fill(self) -> None:
        """Copy the gradients into the buffer; a parameter without a gradient contributes zeros."""
        self._flat = torch.cat([dense_gradient(parameter).reshape(-1) for parameter in self._parameters])

    def start(self, collectives: Collectives) -> Any:
        """Begin to sum the buffer over the ranks, and return the work."""
        return collectives.sum(self.buffer())

    def hand_out(self, used: set[nn.Parameter], as_views: bool) -> None:
        """Make the sums the gradients of those parameters that are used on any rank."""
        for parameter, reduced in zip(self.parameters(), self.gradients(), strict=True):
            if parameter not in used:
                continue
            if as_views:
                parameter.grad = reduced
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = reduced.clone()
            else:
                parameter.grad.copy_(reduced)

    def release(self) -> None:
        """Free the memory, unless gradients are views of it."""
        self._flat = self.work = None

    def clear(self) -> None:
        """Reset the bucket after a step."""
        self.release()
        self.late = False


def dense_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient as a dense tensor, zeros if there is none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, dtype=gradient_dtype(parameter), memory_format=torch.contiguous_format)
    return gradient.to_dense() if gradient.is_sparse else gradient


def make_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[GradBucket]:
    """Assign parameters to buckets, in reverse order of the model, which approximates the order of backward.

    Every rank that holds the same parameters makes the same buckets.
    """
    lists: list[list[nn.Parameter]] = []
    open_lists: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in reversed(parameters):
        kind = (gradient_dtype(parameter), parameter.device)
        size = parameter.numel() * gradient_dtype(parameter).itemsize
        if kind not in open_lists or filled[kind] + size > bucket_bytes:
            open_lists[kind] = []
            filled[kind] = 0
            lists.append(open_lists[kind])
        open_lists[kind].append(parameter)
        filled[kind] += size
    return [GradBucket(index, listed, index == len(lists) - 1) for index, listed in enumerate(lists)]
