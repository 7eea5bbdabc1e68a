"""Times and rates on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def synchronize(device: str) -> None:
    """Wait until a device has done all that it was given."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], device: str, *, times: int = 10, warm: int = 3) -> float:
    """The median of the seconds that some work takes on a device, from its start to the device's being done.

    Args:
        work: The work.
        device: ``"cuda"`` or ``"cpu"``.
        times: How often it is timed.
        warm: How often it runs before.
    """
    for _ in range(warm):
        work()
    found = []
    for _ in range(times):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)
