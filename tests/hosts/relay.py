"""Delays every packet that is routed into a TUN device: ``relay.py DEVICE MILLISECONDS``; says "ready" when it is.

The kernel's own way, ``tc netem``, is missing in many kernels. What comes out of the device goes back into it later, in
the same order; the line in between holds as many packets as arrive, so that the delay takes no bandwidth.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
#: The largest packet, and how many may be on the line: more than a second of a gigabit.
_PACKET_BYTES = 65_535
_MAX_PACKETS = 50_000
_ROUND = 64


def open_device(name: str) -> int:
    """A TUN device's file descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def relay(descriptor: int, seconds: float) -> None:
    """Hand every packet back after its time, until the process is ended."""
    line: deque[tuple[float, bytes]] = deque()
    while True:
        left = max(0.0, line[0][0] - time.monotonic()) if line else None
        if select.select([descriptor], [], [], left)[0]:
            due = time.monotonic() + seconds
            for _ in range(_ROUND):
                try:
                    packet = os.read(descriptor, _PACKET_BYTES)
                except BlockingIOError:
                    break
                if len(line) < _MAX_PACKETS:
                    line.append((due, packet))
        now = time.monotonic()
        while line and line[0][0] <= now:
            with contextlib.suppress(OSError):  # the link it would leave by is cut; a wire would lose it too
                os.write(descriptor, line[0][1])
            line.popleft()


def main() -> None:
    """Open the device, say so, and relay."""
    name, milliseconds = sys.argv[1:]
    descriptor = open_device(name)
    print("ready", flush=True)
    relay(descriptor, float(milliseconds) / 1000)


if __name__ == "__main__":
    main()
