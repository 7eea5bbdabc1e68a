"""Ports that are handed out: no two tests of this machine get the same one, whatever runs side by side."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

#: Below the ports that Linux gives to outgoing connections, and below those that the library derives from a job's name.
FIRST, LAST = 10_000, 19_999

_COUNTER = Path(tempfile.gettempdir()) / f"shardwright-test-ports-{os.getuid()}"


def next_port(counter: Path = _COUNTER) -> int:
    """The next port in turn that nobody listens on; it comes round again after thousands of others.

    Raises:
        OSError: All of them are taken.
    """
    with counter.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        last = int(file.read() or LAST)
        for step in range(1, LAST - FIRST + 2):
            port = FIRST + (last - FIRST + step) % (LAST - FIRST + 1)
            if is_free(port):
                file.truncate(0)
                file.write(str(port))
                return port
    raise OSError(f"every port from {FIRST} to {LAST} is taken")


def is_free(port: int) -> bool:
    """Whether nobody listens on a port, at any address."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind(("", port))
        return True
    return False
