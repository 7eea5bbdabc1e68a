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
    """Copies that run beside the computation, on streams of their own for each device and direction."""

    def serves(self, device: torch.device) -> bool:
        """Return whether tensors of a device are copied by these streams."""
        ...

    def computed(self, device: torch.device) -> Event:
        """Return an event behind what the current stream has been given so far."""
        ...

    def copy_out(self, source: torch.Tensor, into: torch.Tensor, after: Event) -> Event:
        """Begin a copy to host memory, until whose end the allocator does not use the source's memory again.

        Args:
            source: A tensor on the device.
            into: A tensor of that shape in locked host memory, which stays there until the copy's end.
            after: What the copy waits for.

        Returns:
            An event behind the copy.
        """
        ...

    def copy_in(self, source: torch.Tensor, into: torch.Tensor, after: Event) -> Event:
        """Begin a copy from host memory into memory of a device, which the allocator does not use again until its end.

        Args:
            source: A tensor in locked host memory, which stays as it is until the copy's end.
            into: A tensor of that shape on the device.
            after: What the copy waits for.

        Returns:
            An event behind the copy.
        """
        ...

    def copy_back(self, source: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Event]:
        """Begin a copy from host memory to new memory of a device.

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

    def wait(self, device: torch.device, after: Event) -> None:
        """Have the current stream of a device wait for an event."""
        ...

    def enter(self, device: torch.device) -> None:
        """Have this thread wait for events of a device, and for no other device."""
        ...

    def locked(self, nbytes: int) -> torch.Tensor:
        """Return so many bytes of new locked host memory."""
        ...

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in locked host memory."""
        ...


class CudaStreams:
    """CUDA's streams, one for each direction: a copy to the host waits for what is computed, and one back does not."""

    def __init__(self) -> None:
        """Make no stream before a device is used."""
        self._streams: dict[tuple[torch.device, str], Any] = {}

    def serves(self, device: torch.device) -> bool:
        """Return whether a device is one of CUDA's."""
        return device.type == "cuda"

    def computed(self, device: torch.device) -> Event:
        """Return an event behind what the current stream has been given so far."""
        event: Event = torch.cuda.current_stream(device).record_event()
        return event

    def copy_out(self, source: torch.Tensor, into: torch.Tensor, after: Event) -> Event:
        """Begin a copy to host memory on the stream for it."""
        return self._copy(source, into, after, "out", on_device=source)

    def copy_in(self, source: torch.Tensor, into: torch.Tensor, after: Event) -> Event:
        """Begin a copy into memory of a device on the stream for it."""
        return self._copy(source, into, after, "back", on_device=into)

    def _copy(
        self, source: torch.Tensor, into: torch.Tensor, after: Event, name: str, *, on_device: torch.Tensor
    ) -> Event:
        stream = self._stream(on_device.device, name)
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
            on_device.record_stream(stream)
            event: Event = stream.record_event()
        return event

    def copy_back(self, source: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Event]:
        """Begin a copy to a device on the stream for it, to which the memory belongs."""
        stream = self._stream(device, "back")
        with torch.cuda.stream(stream):
            tensor = torch.empty(source.shape, dtype=source.dtype, device=device)
            tensor.copy_(source, non_blocking=True)
            return tensor, stream.record_event()

    def use(self, tensor: torch.Tensor, after: Event) -> None:
        """Have the current stream wait for an event, and the allocator know that it uses a tensor."""
        self.wait(tensor.device, after)
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def wait(self, device: torch.device, after: Event) -> None:
        """Have the current stream of a device wait for an event."""
        current: Any = torch.cuda.current_stream(device)
        current.wait_event(after)

    def enter(self, device: torch.device) -> None:
        """Set the device of this thread: a new one would begin to use the first, and keep memory there."""
        torch.cuda.set_device(device)

    def locked(self, nbytes: int) -> torch.Tensor:
        """Return so many bytes of new locked host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in locked host memory."""
        return tensor.is_pinned()

    def _stream(self, device: torch.device, direction: str) -> Any:
        found = self._streams.get((device, direction))
        if found is None:
            made: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            found = self._streams.setdefault((device, direction), made)  # threads of autograd may make it at once
        return found
