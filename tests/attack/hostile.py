"""A rank that trains, and then puts bytes on its connections: ``hostile.py CONFIGURATION``, the bytes from the input.

The test tells it a line of hexadecimal digits; it writes them on every connection that it has to another rank.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "failures" / "programs"))

import rig
import shardwright as smp
from rig import await_word, say


def connections() -> list[socket.socket]:
    """The established TCP connections of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(entry.name)))
            if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM and one.getpeername():
                found.append(one)
        except OSError:
            continue
    return found


def turn_hostile() -> None:
    digits = await_word()
    for connection in connections():
        try:
            connection.sendall(bytes.fromhex(digits))
        except OSError:
            continue
    say("harmed")


def main() -> None:
    job = rig.start(**json.loads(sys.argv[1]))
    if smp.rank() == smp.size() - 1:
        threading.Thread(target=turn_hostile, daemon=True).start()
    number = 0
    while True:
        error = job.exact_step()
        say("step", number=number, error=error, strangers=smp.stats()["communication"]["strangers_dropped"])
        number += 1


if __name__ == "__main__":
    main()
