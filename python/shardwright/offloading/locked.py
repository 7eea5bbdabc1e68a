"""Locked host memory for what is kept long, in blocks that are divided into places."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import torch

#: Blocks are powers of two, to which PyTorch's allocator of locked memory rounds. One is about as large as the others
#: together, so that there are few, and what is not used is less than what is.
_FIRST_BLOCK, _LAST_BLOCK = 1 << 20, 256 << 20
#: Places begin at multiples of a page.
_ALIGNMENT = 4096


class LockedMemory:
    """Divides blocks of locked host memory into places, each of which is free when no tensor is there any more."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        """Begin without a block.

        Args:
            allocate: Returns so many bytes of new locked memory.
        """
        self._allocate = allocate
        self._lock = threading.RLock()
        self._blocks: list[torch.Tensor] = []
        #: For each block the free places, begin and end, in their order.
        self._free: list[list[tuple[int, int]]] = []
        #: Places whose tensors are gone. They may go while a place is looked for, in the same thread.
        self._returned: deque[tuple[int, int, int]] = deque()

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return sum(block.numel() for block in self._blocks)

    def map(self, nbytes: int) -> torch.Tensor:
        """Return so many bytes, of any values, which have a storage of their own.

        Args:
            nbytes: How many; at least one.
        """
        with self._lock:
            self._take_back()
            room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            number, begin = self._find(room) or self._grow(room)
            block = self._blocks[number]
        place = (ctypes.c_char * nbytes).from_address(block.data_ptr() + begin)
        # The block is there as long as a tensor in it.
        weakref.finalize(place, _give_back, self._returned, block, (number, begin, begin + room)).atexit = False
        return torch.frombuffer(place, dtype=torch.uint8)

    def _find(self, room: int) -> tuple[int, int] | None:
        for number, free in enumerate(self._free):
            for index, (begin, end) in enumerate(free):
                if end - begin >= room:
                    free[index : index + 1] = [(begin + room, end)] if end - begin > room else []
                    return number, begin
        return None

    def _grow(self, room: int) -> tuple[int, int]:
        wanted = max(room, min(max(self.nbytes, _FIRST_BLOCK), _LAST_BLOCK))
        self._blocks.append(self._allocate(1 << (wanted - 1).bit_length()))
        self._free.append([(0, self._blocks[-1].numel())])
        found = self._find(room)
        assert found is not None, "the new block has room"
        return found

    def _take_back(self) -> None:
        while self._returned:
            number, begin, end = self._returned.popleft()
            places = sorted([*self._free[number], (begin, end)])
            joined = places[:1]
            for _, (start, stop) in pairwise(places):
                if joined[-1][1] == start:
                    joined[-1] = joined[-1][0], stop
                else:
                    joined.append((start, stop))
            self._free[number] = joined


def _give_back(returned: deque[tuple[int, int, int]], _: torch.Tensor, place: tuple[int, int, int]) -> None:
    returned.append(place)
