"""Tensors that are kept by the core instead of by PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from shardwright import _core
from shardwright.offloading.device import DeviceTransfers

#: Smaller tensors stay where they are: a place in the file begins at a page.
MIN_BYTES = 4096


class OffloadedTensor:
    """What is known of a tensor whose bytes the core keeps.

    Attributes:
        number: Its number in the core.
        device: Where it is computed with.
    """

    def __init__(self, number: int, dense: torch.Tensor, whole: torch.Tensor) -> None:
        """Describe it.

        Args:
            number: Its number in the core.
            dense: The elements that the core keeps.
            whole: The tensor, which may be an expansion of them.
        """
        self.number = number
        self.device = dense.device
        self._dtype = dense.dtype
        self._size, self._strides = dense.size(), dense.stride()
        self._expanded = whole.size() if whole.size() != dense.size() else None

    def tensor_of(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor in bytes that have come back, which must not be written to."""
        dense = data.view(self._dtype).as_strided(self._size, self._strides)
        return dense if self._expanded is None else dense.expand(self._expanded)


class Kept:
    """The tensors that one checkpointed call keeps in the core."""

    def __init__(self, call: _core.OffloadedCall, transfers: DeviceTransfers) -> None:
        """Keep none yet.

        Args:
            call: The call.
            transfers: Has the tensors of devices.
        """
        self._call = call
        self._transfers = transfers
        self._tensors: dict[int, OffloadedTensor] = {}

    def add(self, dense: torch.Tensor, whole: torch.Tensor) -> OffloadedTensor:
        """Keep a copy of a tensor.

        Args:
            dense: Its elements, each once.
            whole: The tensor itself.
        """
        elements = dense if is_dense(dense) else dense.contiguous()
        if self._transfers.serves(elements.device):
            number = self._transfers.keep(self._call, _bytes_of(elements))
        else:
            number = self._call.add(elements.data_ptr(), elements.numel() * elements.element_size())
        kept = self._tensors[number] = OffloadedTensor(number, elements, whole)
        return kept

    def share(self, kept: OffloadedTensor) -> bool:
        """Keep a tensor that other calls keep; return False if none does any more."""
        if not self._call.share(kept.number):
            return False
        self._tensors[kept.number] = kept
        return True

    def take(self) -> Mapping[int, torch.Tensor]:
        """Return the tensors by number, which must not be written to; waits for those that are not back."""
        found = {number: self._take(self._tensors[number], capsule) for number, capsule in self._call.take()}
        self._transfers.settle()
        return found

    def _take(self, kept: OffloadedTensor, capsule: Any) -> torch.Tensor:
        if self._transfers.serves(kept.device):
            return kept.tensor_of(self._transfers.take(kept.number, capsule))
        return kept.tensor_of(from_dlpack(capsule))


def may_be_offloaded(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor can be kept as bytes, and are worth it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and tensor.numel() * tensor.element_size() >= MIN_BYTES
    )


def _bytes_of(dense: torch.Tensor) -> torch.Tensor:
    """Return a copy of the bytes of a tensor without gaps, in the order of memory."""
    flat = dense.as_strided((dense.numel(),), (1,))
    return torch.empty_like(flat).copy_(flat).view(torch.uint8)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie next to one another in memory, in whatever order."""
    expected = 1
    strides: list[Any] = sorted(zip(tensor.stride(), tensor.size(), strict=True))
    for stride, size in strides:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
