"""Offloaded tensors of devices: copies to host memory and back, beside the computation."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from shardwright import _core
from shardwright.offloading.streams import CopyStreams, Event

#: How much may be on its way from a device to host memory at once, still on the device. A forward waits for more.
MOST_LEAVING_BYTES = 256 << 20


@dataclass
class _Resident:
    """Bytes on a device.

    Attributes:
        data: The bytes.
        after: Behind what writes them.
        is_only: Whether the bytes are nowhere else yet.
    """

    data: torch.Tensor
    after: Event
    is_only: bool


@dataclass(frozen=True)
class _Leaving:
    """A copy to host memory that is under way."""

    number: int
    memory: _core.HostMemory
    nbytes: int
    done: Event


class DeviceTransfers:
    """Does what the core's plan asks for with tensors of devices, between the tasks of the rank.

    The core decides which tensors have to leave and which come back within the horizon, and it moves host memory to
    the disk and back. A tensor is on the device alone until it has to leave. Its bytes are given to the core when the
    copy to host memory is done, and let go on the device then unless they are needed soon.
    """

    def __init__(self, core: _core.Offload, streams: CopyStreams) -> None:
        """Begin with none.

        Args:
            core: The storage of the rank.
            streams: The streams of its devices.
        """
        self._core = core
        #: Autograd has a thread for each device.
        self._lock = threading.RLock()
        self._streams = streams
        self._resident: dict[int, _Resident] = {}
        self._devices: dict[int, torch.device] = {}
        self._leaving: deque[_Leaving] = deque()
        #: Host memory that copies to devices read, until they are done.
        self._reading: deque[tuple[Event, torch.Tensor]] = deque()

    def serves(self, device: torch.device) -> bool:
        """Return whether tensors of a device are kept here."""
        return self._streams.serves(device)

    def keep(self, call: _core.OffloadedCall, data: torch.Tensor) -> int:
        """Keep bytes of a device, which nobody else writes to.

        Args:
            call: The call that keeps them.
            data: The bytes.

        Returns:
            Their number in the core.
        """
        with self._lock:
            while sum(one.nbytes for one in self._leaving) > MOST_LEAVING_BYTES:
                self._leaving[0].done.synchronize()
                self.settle()
            number = call.add_on_device(data.numel())
            self._resident[number] = _Resident(data, self._streams.computed(data.device), is_only=True)
            self._devices[number] = data.device
            self.settle()
            return number

    def take(self, number: int, capsule: Any) -> torch.Tensor:
        """Return bytes on their device, ready for the current stream, which must not be written to.

        Args:
            number: Their number in the core.
            capsule: Their bytes in host memory, if they are there.
        """
        with self._lock:
            if number not in self._resident:
                self._bring_back(number, capsule)
            resident = self._resident[number]
            self._streams.use(resident.data, resident.after)
            return resident.data

    def settle(self) -> None:
        """See what has been done, and begin what has to be done next."""
        with self._lock:
            if self._devices or self._reading:
                self._settle()

    def close(self) -> None:
        """Wait for the copies that are under way: host memory must stay until then."""
        with self._lock:
            for done in (*(one.done for one in self._leaving), *(done for done, _ in self._reading)):
                done.synchronize()
            self._leaving.clear()
            self._reading.clear()
            self._resident.clear()
            self._devices.clear()

    def _settle(self) -> None:
        while self._reading and self._reading[0][0].query():
            self._reading.popleft()
        while self._leaving and self._leaving[0].done.query():
            arrived = self._leaving.popleft()
            self._core.arrived(arrived.number, arrived.memory)
            self._resident[arrived.number].is_only = False
        leaving, gone, near = self._core.changes()
        for number in leaving:
            self._copy_out(number)
        for number in gone:
            self._resident.pop(number, None)
            del self._devices[number]
        for number in [number for number, one in self._resident.items() if not one.is_only and number not in near]:
            del self._resident[number]
        for number in sorted(near - self._resident.keys()):
            if (capsule := self._core.bytes_of(number)) is not None:
                self._bring_back(number, capsule)

    def _host_memory(self, nbytes: int) -> _core.HostMemory:
        memory = self._core.lease(nbytes)
        if memory is None:
            # As PyTorch's allocator of locked memory rounds it too.
            block = self._streams.locked(1 << (nbytes - 1).bit_length())
            memory = self._core.lease_new(block, block.data_ptr(), block.numel(), nbytes)
        return memory

    def _copy_out(self, number: int) -> None:
        resident = self._resident[number]
        nbytes = resident.data.numel()
        memory = self._host_memory(nbytes)
        into: torch.Tensor = from_dlpack(memory.bytes())
        done = self._streams.copy_out(resident.data, into, resident.after)
        self._leaving.append(_Leaving(number, memory, nbytes, done))

    def _bring_back(self, number: int, capsule: Any) -> None:
        source: torch.Tensor = from_dlpack(capsule)
        if not self._streams.is_locked(source):  # the thread found no locked memory to read into; next time it does
            source = torch.Tensor.copy_(from_dlpack(self._host_memory(source.numel()).bytes()), source)
        data, done = self._streams.copy_back(source, self._devices[number])
        self._reading.append((done, source))
        self._resident[number] = _Resident(data, done, is_only=False)
