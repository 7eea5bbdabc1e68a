"""The most memory that a process has resident, as the kernel counts it."""

from __future__ import annotations

import re
from pathlib import Path


def peak_bytes() -> int:
    """The most that this process had since the last :func:`forget_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def forget_peak() -> int:
    """Have the kernel count anew; what the process has now, from which the peak is counted."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()
