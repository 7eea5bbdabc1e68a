"""Places on a device through which the state of an optimizer passes, and the copies there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardwright.offloading.streams import CopyStreams, Event
from shardwright.optimizer.offloading.storage import Pages

#: One that is filled, one whose chunk is updated, and one that is emptied.
NUM_SLOTS = 3
#: Tensors begin at multiples of so many bytes, as those of PyTorch's allocator do.
_ALIGNMENT = 512


class Item(NamedTuple):
    """Elements of a tensor that come to the device and go back.

    Attributes:
        host: Their bytes in host memory.
        pages: Where these are in the file; None in locked memory.
        like: A tensor that has the dtype, the shape and the strides which the elements get on the device.
    """

    host: torch.Tensor
    pages: Pages | None
    like: torch.Tensor


@dataclass
class Slot:
    """A place for a chunk.

    Attributes:
        device: Bytes on the device.
        locked: Bytes in locked host memory, through which the state passes that is in a file.
        free: Behind the last copy from the device's bytes.
        read: Behind the last copy from the locked bytes.
        written: Ends when the last chunk is in the file.
    """

    device: torch.Tensor | None = None
    locked: torch.Tensor | None = None
    free: Event | None = None
    read: Event | None = None
    written: Future[None] | None = None


@dataclass
class Cargo:
    """What a chunk brings to the device.

    Attributes:
        items: The tensors.
        slot: Their place.
        reading: Ends when they are in the slot's locked bytes; None if they are read from where they are.
        tensors: They on the device, once the copies have begun.
        arrived: Behind the copies.
    """

    items: Sequence[Item]
    slot: Slot
    reading: Future[None] | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    arrived: Event | None = None


class Slots:
    """Moves the tensors of one chunk after another. Who uses them says what; the order of copies and waits is here.

    - SL-1: Bytes of a slot are written when all copies from them are done: on the device its stream waits, in locked
      memory a thread.
    - SL-2: What computes waits for the copies to the device, and copies from it for what computes.
    - SL-3: Pages of the file are let go when what was computed is in them.
    - SL-4: :meth:`close` returns when no copy is under way, whatever happened before.
    """

    def __init__(self, streams: CopyStreams, device: torch.device, *, is_locked: bool) -> None:
        """Begin without memory.

        Args:
            streams: The streams of the device.
            device: The device.
            is_locked: Whether tensors are in locked host memory, which the device reads and writes itself.
        """
        self._streams, self._device, self._is_locked = streams, device, is_locked
        self._slots = [Slot() for _ in range(NUM_SLOTS)]
        self._number = 0
        #: Host memory that copies write to or read, until the end.
        self._in_use: list[torch.Tensor] = []
        # One reads and one writes, so that the next chunk's reads do not wait for writes.
        self._threads: list[ThreadPoolExecutor] = []
        if not is_locked:
            self._threads = [
                ThreadPoolExecutor(1, f"shardwright-optimizer-{name}", streams.enter, (device,))
                for name in ("read", "write")
            ]

    @property
    def locked_bytes(self) -> int:
        """The bytes of locked host memory of all slots."""
        return sum(slot.locked.numel() for slot in self._slots if slot.locked is not None)

    def load(self, items: Sequence[Item]) -> Cargo:
        """Begin to bring tensors to the next slot, as far as no copy to the device is needed for it.

        Args:
            items: The tensors.
        """
        slot = self._slots[self._number % NUM_SLOTS]
        self._number += 1
        cargo = Cargo(items, slot)
        if not self._is_locked:
            cargo.reading = self._threads[0].submit(self._read, cargo)
        return cargo

    def _read(self, cargo: Cargo) -> None:
        slot = cargo.slot
        if slot.written is not None:
            slot.written.result()
        if slot.read is not None:
            slot.read.synchronize()
        slot.locked = self._with_room(slot.locked, _room([one.host for one in cargo.items]), self._streams.locked)
        for item, into in zip(cargo.items, _places(slot.locked, [one.host for one in cargo.items]), strict=True):
            assert item.pages is not None, "it is in a file"
            item.pages.load()
            into.copy_(item.host)

    def bring(self, cargo: Cargo) -> None:
        """Begin the copies to the device, if they have not begun.

        Args:
            cargo: What is brought.
        """
        if cargo.arrived is not None:
            return
        slot, streams = cargo.slot, self._streams
        sources = [one.host for one in cargo.items]
        if cargo.reading is not None:
            cargo.reading.result()
            assert slot.locked is not None, "it was read into"
            sources = _places(slot.locked, sources)
        before = slot.device
        slot.device = self._with_room(before, _room(sources), self._on_device)
        after = slot.free
        if after is None or slot.device is not before:  # the allocator's memory is free behind what is computed so far
            after = streams.computed(self._device)
        cargo.arrived = after
        for source, into in zip(sources, _places(slot.device, sources), strict=True):
            cargo.arrived = streams.copy_in(source, into, after)
        slot.read = cargo.arrived
        cargo.tensors = [
            _bytes_as(place, item.like) for place, item in zip(_places(slot.device, sources), cargo.items, strict=True)
        ]

    def use(self, cargo: Cargo) -> list[torch.Tensor]:
        """Have what is computed from now on wait for the tensors, and return them.

        Args:
            cargo: What was brought.
        """
        assert cargo.arrived is not None, "it was brought"
        self._streams.wait(self._device, cargo.arrived)
        return cargo.tensors

    def store(self, cargo: Cargo, results: Sequence[tuple[torch.Tensor, torch.Tensor, Pages | None]]) -> None:
        """Begin to take results back, and give the slot to another chunk afterwards.

        Args:
            cargo: What was brought for them.
            results: Pairs of bytes on the device and in host memory, with their place in the file.
        """
        slot, streams = cargo.slot, self._streams
        done = computed = streams.computed(self._device)
        targets = [host for _, host, _ in results]
        self._in_use += targets
        if not self._is_locked:
            # What is read from the locked bytes has arrived before what was computed from it.
            if slot.locked is not None:
                self._in_use.append(slot.locked)
            slot.locked = self._with_room(slot.locked, _room(targets), streams.locked)
            staged = _places(slot.locked, targets)
        else:
            staged = targets
        for (source, _, _), into in zip(results, staged, strict=True):
            done = streams.copy_out(source, into, computed)
        slot.free = done
        if not self._is_locked:
            slot.written = self._threads[1].submit(self._write, done, staged, results)

    def _write(
        self,
        done: Event,
        staged: Sequence[torch.Tensor],
        results: Sequence[tuple[torch.Tensor, torch.Tensor, Pages | None]],
    ) -> None:
        done.synchronize()
        for source, (_, host, pages) in zip(staged, results, strict=True):
            assert pages is not None, "it is in a file"
            pages.load()
            host.copy_(source)
            pages.release()

    def close(self) -> None:
        """Wait until all is in host memory, or in the file.

        Raises:
            OffloadError: It cannot be written there.
        """
        for pool in self._threads:
            pool.shutdown()
        for slot in self._slots:  # what is behind earlier copies from a slot waited for them
            for event in (slot.read, slot.free):
                if event is not None:
                    event.synchronize()
        self._in_use.clear()
        for slot in self._slots:
            if slot.written is not None:
                slot.written.result()

    def _on_device(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    @staticmethod
    def _with_room(memory: torch.Tensor | None, nbytes: int, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
        if memory is not None and memory.numel() >= nbytes:
            return memory
        return make(nbytes)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without gaps, in the order of memory; a view of it.

    Args:
        tensor: The tensor.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _bytes_as(place: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return place.view(like.dtype).as_strided(like.size(), like.stride())


def _room(tensors: Sequence[torch.Tensor]) -> int:
    return sum(-(-one.numel() // _ALIGNMENT) * _ALIGNMENT for one in tensors)


def _places(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return places one behind another, as large as these tensors of bytes."""
    places, begin = [], 0
    for one in tensors:
        places.append(memory[begin : begin + one.numel()])
        begin += -(-one.numel() // _ALIGNMENT) * _ALIGNMENT
    return places
