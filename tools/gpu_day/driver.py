"""CUDA's driver by ctypes, or its stand-in: the functions that the library relies on, as raw as it calls them."""

from __future__ import annotations

import ctypes
from typing import Any

#: Registered memory that every context of the process may use.
PORTABLE = 1
#: Opens a peer's memory from the current device.
LAZY_PEER_ACCESS = 1
_DISABLE_TIMING = 2
_NON_BLOCKING = 1
NOT_READY = 600


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class DriverError(Exception):
    """A call failed.

    Attributes:
        code: What it returned.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        """Say which call failed, with the code's name."""
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class Driver:
    """The driver, with the first device's primary context current in the calling thread."""

    def __init__(self, library: str | None) -> None:
        """Load it.

        Args:
            library: The path of the stand-in; None for the driver itself.
        """
        self._library = ctypes.CDLL(library or "libcuda.so.1")
        self.check("cuInit", 0)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self.check("cuDeviceGet", ctypes.byref(device), 0)
        self.check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.check("cuCtxPushCurrent_v2", self._context)

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function; its code."""
        return int(getattr(self._library, name)(*arguments))

    def check(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            DriverError: It failed.
        """
        code = self.call(name, *arguments)
        if code:
            raise DriverError(name, code, self.name_of(code))

    def name_of(self, code: int) -> str:
        """The name of a code."""
        text = ctypes.c_char_p()
        if self.call("cuGetErrorName", code, ctypes.byref(text)) or text.value is None:
            return f"code {code}"
        return text.value.decode()

    def outcome(self, name: str, *arguments: Any) -> str:
        """Call a function; the name of its code."""
        return self.name_of(self.call(name, *arguments))

    def allocate(self, size: int) -> int:
        """Device memory; its address."""
        address = ctypes.c_uint64()
        self.check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        """Free it."""
        self.check("cuMemFree_v2", ctypes.c_uint64(address))

    def share(self, address: int) -> bytes:
        """What another process needs to open the allocation at an address."""
        handle = IpcHandle()
        self.check("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Open another process's allocation; its address here."""
        address = ctypes.c_uint64()
        self.check("cuIpcOpenMemHandle_v2", ctypes.byref(address), IpcHandle.from_buffer_copy(handle), LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Close it."""
        self.check("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def range(self, address: int) -> tuple[int, int]:
        """The start and the size of the allocation in which an address lies."""
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.check("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address))
        return start.value, size.value

    def register(self, start: int, size: int) -> str:
        """Lock host memory in place; the name of the outcome."""
        return self.outcome("cuMemHostRegister_v2", ctypes.c_void_p(start), ctypes.c_size_t(size), PORTABLE)

    def unregister(self, start: int) -> str:
        """Undo that; the name of the outcome."""
        return self.outcome("cuMemHostUnregister", ctypes.c_void_p(start))

    def stream(self) -> ctypes.c_void_p:
        """A new stream."""
        stream = ctypes.c_void_p()
        self.check("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def event(self) -> ctypes.c_void_p:
        """A new event, without a clock."""
        event = ctypes.c_void_p()
        self.check("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        return event

    def copy(self, to: int, source: int, size: int, stream: ctypes.c_void_p) -> None:
        """Queue a copy between any two addresses."""
        self.check("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size), stream)

    def wait(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        """Wait until a stream has done all that it was given, by asking again and again; how often it asked."""
        self.check("cuEventRecord", event, stream)
        asked = 1
        while (code := self.call("cuEventQuery", event)) == NOT_READY:
            asked += 1
        if code:
            raise DriverError("cuEventQuery", code, self.name_of(code))
        return asked
