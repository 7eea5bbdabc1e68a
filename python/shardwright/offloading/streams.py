"""What offloading needs of a device: streams, events and locked host memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Return whether it has been reached."""
        ...

    def synchronize(self) -> None:
        """Wait until it has been reached."""
        ...


class CopyStreams(Protocol):
    """Copies that run beside the computation, on a stream of their own for each device."""

    def serves(self, device: torch.device) -> bool:
        """Return whether tensors of a device are copied by these streams."""
        ...

    def computed(self, device: torch.device) -> Event:
        """Return an event behind what the current stream has been given so far."""
        ...

    def copy_out(self, source: torch.Tensor, into: torch.Tensor, after: Event) -> Event:
        """Begin a copy to host memory, until whose end the allocator does not use the source's memory again.

        Args:
            source: Bytes on the device.
            into: Bytes in locked host memory, which stay there until the copy's end.
            after: What the copy waits for.

        Returns:
            An event behind the copy.
        """
        ...

    def copy_back(self, source: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Event]:
        """Begin a copy from host memory to a device.

        Args:
            source: Bytes in locked host memory, which stay there until the copy's end.
            device: The device.

        Returns:
            The bytes on the device, and an event behind the copy.
        """
        ...

    def use(self, tensor: torch.Tensor, after: Event) -> None:
        """Have the current stream wait for an event, and the allocator know that it uses a tensor."""
        ...

    def locked(self, nbytes: int) -> torch.Tensor:
        """Return so many bytes of new locked host memory."""
        ...

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in locked host memory."""
        ...


class CudaStreams:
    """CUDA's streams."""

    def __init__(self) -> None:
        """Make no stream before a device is used."""
        self._streams: dict[torch.device, Any] = {}

    def serves(self, device: torch.device) -> bool:
        """Return whether a device is one of CUDA's."""
        return device.type == "cuda"

    def computed(self, device: torch.device) -> Event:
        """Return an event behind what the current stream has been given so far."""
        event: Event = torch.cuda.current_stream(device).record_event()
        return event

    def copy_out(self, source: torch.Tensor, into: torch.Tensor, after: Event) -> Event:
        """Begin a copy to host memory on the copy stream."""
        stream = self._stream(source.device)
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
            source.record_stream(stream)
            event: Event = stream.record_event()
        return event

    def copy_back(self, source: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Event]:
        """Begin a copy to a device on the copy stream, to which the memory belongs."""
        stream = self._stream(device)
        with torch.cuda.stream(stream):
            tensor = torch.empty(source.shape, dtype=source.dtype, device=device)
            tensor.copy_(source, non_blocking=True)
            return tensor, stream.record_event()

    def use(self, tensor: torch.Tensor, after: Event) -> None:
        """Have the current stream wait for an event, and the allocator know that it uses a tensor."""
        stream: Any = torch.cuda.current_stream(tensor.device)
        stream.wait_event(after)
        tensor.record_stream(stream)

    def locked(self, nbytes: int) -> torch.Tensor:
        """Return so many bytes of new locked host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in locked host memory."""
        return tensor.is_pinned()

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]
