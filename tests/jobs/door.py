"""The door at which the ranks of one host meet, for tests that look at what rank 0 tells there."""

from __future__ import annotations

import hashlib
import socket
import struct
import time
from contextlib import suppress
from typing import NamedTuple


class Told(NamedTuple):
    """What rank 0 tells: its port, that of its store (0 for none), and the secret that it made up (empty for none)."""

    port: int
    store: int
    secret: bytes


def address_of(name: str) -> bytes:
    """Where the ranks of a job of this name meet."""
    return f"\0shardwright/{hashlib.sha256(name.encode()).hexdigest()}".encode()


def name_of(port: int, start: int = 0) -> str:
    """The name of a job whose ranks were given this port, at their first start or a later one."""
    return f"127.0.0.1:{port}/0 127.0.0.1:{port} {start}"


def ask(name: str, seconds: float) -> Told:
    """Ask at the door, which may not be there yet.

    Raises:
        TimeoutError: It is not there in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(ConnectionError), socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(seconds)
            caller.connect(address_of(name))
            told = b"".join(iter(lambda: caller.recv(4096), b""))
            if told:
                return Told(*struct.unpack("<HH", told[:4]), told[4:])
        time.sleep(0.01)
    raise TimeoutError(f"nobody waits at the door of {name}")
