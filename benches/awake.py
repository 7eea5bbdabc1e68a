"""Keeps processors from halting while others sleep.

A processor that halts is slow when it comes back: its caches are cold, and a hypervisor has given it to somebody else.
A pipeline worth having keeps processors busy, so stages that sleep would be charged for what no user would see.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

#: As long as someone holds it open, Linux lets no processor sleep so deeply that waking takes longer (microseconds).
_LATENCY = Path("/dev/cpu_dma_latency")


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """Idle processors poll, where this user may ask for it; otherwise standard error says that they do not."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_LATENCY.open("wb", buffering=0)).write((0).to_bytes(4, sys.byteorder))
        except OSError as error:
            print(f"processors may halt between tasks: {error}", file=sys.stderr)
        yield
