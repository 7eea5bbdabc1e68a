"""Locked host memory through which the tensors of devices go to checkpoints and come back, a block at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwright.offloading.streams import CopyStreams, CudaStreams, Event

#: A buffer. There are two: while one is copied, the other is read or written.
BUFFER_BYTES = 32 << 20
_NUM_BUFFERS = 2

#: A box of a tensor: the first element of each dim, and how many.
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class _Buffer:
    """A buffer, and the copy that uses it."""

    memory: torch.Tensor | None = None
    done: Event | None = None


class Staging:
    """Two buffers for the tensors of devices. Host memory is bounded by them, whatever is saved or loaded."""

    def __init__(self, streams: CopyStreams | None = None) -> None:
        """Begin without memory.

        Args:
            streams: Those of the devices; by default CUDA's.
        """
        self._streams: CopyStreams = CudaStreams() if streams is None else streams
        self._buffers = [_Buffer() for _ in range(_NUM_BUFFERS)]
        self._number = 0

    def serves(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is of a device."""
        return self._streams.serves(tensor.device)

    @property
    def locked_bytes(self) -> int:
        """The bytes of locked host memory."""
        return sum(one.memory.numel() for one in self._buffers if one.memory is not None)

    def blocks(self, views: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the elements of tensors in host memory, contiguous and in order; each is good until the next.

        The next block is copied while one is looked at. Tensors that are in host memory are given as they are.

        Args:
            views: The tensors.
        """
        before: tuple[torch.Tensor, Event | None] | None = None
        for view in views:
            if not self.serves(view):
                if before is not None:
                    yield _arrived(*before)
                    before = None
                yield view.detach().contiguous()
                continue
            for box in boxes_within(view.shape, view.element_size(), BUFFER_BYTES):
                now = self._copy_out(within(view.detach(), box))
                if before is not None:
                    yield _arrived(*before)
                before = now
        if before is not None:
            yield _arrived(*before)

    def _copy_out(self, block: torch.Tensor) -> tuple[torch.Tensor, Event]:
        # Of what is in this buffer, whoever asked for the block after it has seen the end.
        buffer, into = self._place(block)
        buffer.done = self._streams.copy_out(block, into, self._streams.computed(block.device))
        return into, buffer.done

    def load(self, views: Iterable[tuple[torch.Tensor, Callable[[Sequence[tuple[torch.Tensor, Box]]], None]]]) -> None:
        """Fill tensors of devices, block by block, while the block before is copied.

        Args:
            views: Each with what reads boxes of it into contiguous tensors in host memory.
        """
        for view, read in views:
            for box in boxes_within(view.shape, view.element_size(), BUFFER_BYTES):
                block = within(view, box)
                buffer, source = self._place(block)
                read([(source, box)])
                buffer.done = self._streams.copy_in(source, block, self._streams.computed(view.device))
                # What is computed from now on sees it.
                self._streams.wait(view.device, buffer.done)
        self.settle()

    def settle(self) -> None:
        """Wait for all copies."""
        for buffer in self._buffers:
            if buffer.done is not None:
                buffer.done.synchronize()
                buffer.done = None

    def _place(self, block: torch.Tensor) -> tuple[_Buffer, torch.Tensor]:
        """Return a buffer that no copy uses, and its part that is like a block."""
        buffer = self._buffers[self._number % _NUM_BUFFERS]
        self._number += 1
        if buffer.done is not None:
            buffer.done.synchronize()
            buffer.done = None
        if buffer.memory is None:
            buffer.memory = self._streams.locked(BUFFER_BYTES)
        nbytes = block.numel() * block.element_size()
        return buffer, buffer.memory[:nbytes].view(block.dtype).view(block.shape)


def _arrived(block: torch.Tensor, done: Event | None) -> torch.Tensor:
    if done is not None:
        done.synchronize()
    return block


def within(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of a box of a tensor.

    Args:
        tensor: The tensor.
        box: The box.
    """
    for dim, (begin, count) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, begin, count)
    return tensor


def boxes_within(shape: Sequence[int], itemsize: int, nbytes: int) -> Iterator[Box]:
    """Yield boxes whose elements, one box after another, are a tensor's in order; none has more than so many bytes.

    Args:
        shape: The tensor's.
        itemsize: Of an element, in bytes.
        nbytes: The most that a box has; at least an element's.
    """
    sides = tuple(shape)
    if math.prod(sides) == 0:
        return
    dim = 0
    while dim < len(sides) and math.prod(sides[dim + 1 :]) * itemsize > nbytes:
        dim += 1
    if dim == len(sides):
        yield (0,) * len(sides), sides
        return
    rows = max(nbytes // (math.prod(sides[dim + 1 :]) * itemsize), 1)
    rest = (0,) * (len(sides) - dim - 1)
    for outer in range(math.prod(sides[:dim])):
        place: list[int] = []
        for side in reversed(sides[:dim]):
            outer, at = divmod(outer, side)
            place.insert(0, at)
        for begin in range(0, sides[dim], rows):
            count = min(rows, sides[dim] - begin)
            yield (*place, begin, *rest), (*(1 for _ in place), count, *sides[dim + 1 :])
