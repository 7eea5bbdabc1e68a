"""Temporary host memory for large tensors."""

from __future__ import annotations

import ctypes
import mmap

import torch

#: Bytes from which memory is taken from the system, and not from the heap.
_LARGE = 1 << 17
#: Bytes after which what is free in the heap is given back.
_TRIMMED = 1 << 24


def scratch_like(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Create an uninitialized tensor like ``meta``, whose memory is returned to the system when it is freed.

    In the heap it would leave a hole that no other of its size fits into, once something small took a piece of it.
    """
    if device.type != "cpu" or meta.numel() * meta.element_size() < _LARGE:
        return torch.empty_like(meta, device=device)
    mapped = torch.frombuffer(mmap.mmap(-1, meta.untyped_storage().nbytes()), dtype=meta.dtype)
    return mapped.as_strided(meta.shape, meta.stride(), meta.storage_offset())


class Heap:
    """Returns free heap memory to the system after a number of bytes of tensors were created."""

    def __init__(self) -> None:
        """Nothing was made yet."""
        self._made = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library

    def add(self, tensors: list[torch.Tensor]) -> None:
        """Count created tensors, which may soon be freed."""
        self.count(sum(tensor.nbytes for tensor in tensors))

    def count(self, num_bytes: int) -> None:
        """Count bytes that were used, and may be free by now."""
        self._made += num_bytes
        if self._made > _TRIMMED:
            self._made = 0
            if self._trim is not None:
                self._trim(0)
