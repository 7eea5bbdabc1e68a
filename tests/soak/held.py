"""What a process holds of the system: descriptors, threads, mappings, shared memory, resident memory."""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import shardwright as smp

_SELF = Path("/proc/self")
MB = 1 << 20


#: ``M_MMAP_THRESHOLD`` of the C library's allocator, and the threshold that it begins with.
_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 128 << 10

#: How long the last users of the persistent buffer have to free it.
_REST_SECONDS = 5.0


def give_large_memory_back() -> None:
    """Have the C library's allocator give every large piece back to the system as soon as it is freed.

    Left alone it raises that threshold up to 32 MB as pieces are freed, and keeps tens of MB for each thread's arena:
    growth that comes and goes, beside which a leak would not be seen.
    """
    if not ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _THRESHOLD_BYTES):
        raise RuntimeError("the allocator has no such setting")


class Held(NamedTuple):
    """What a process holds.

    Attributes:
        descriptors: How many of each kind, or of each file.
        threads: How many of each name.
        maps: How many mappings of each file, memory files and segments of shared memory included.
        shared_mb: What of its memory other processes may map.
        resident_mb: What of its own memory is in use.
        buffer_bytes: What of the persistent buffer is in use, here or where it was sent to; 0 without a job.
    """

    descriptors: dict[str, int]
    threads: dict[str, int]
    maps: dict[str, int]
    shared_mb: float
    resident_mb: float
    buffer_bytes: int

    @staticmethod
    def now() -> Held:
        """What this process holds, once it has given back what it keeps for itself."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is left then is in use, and no free memory of the allocator's
        descriptors = (_kind(target) for target in _descriptors())
        threads = (_numberless(text) for text in _texts(_SELF.glob("task/*/comm")))
        lines = (_SELF / "maps").read_text().splitlines()
        maps = (_numberless(line.split(maxsplit=5)[5]) for line in lines if "/" in line)
        status = dict(re.findall(r"^(\w+):\s+(\d+) kB$", (_SELF / "status").read_text(), re.MULTILINE))
        shared, resident = (int(status[name]) * 1024 / MB for name in ("RssShmem", "VmRSS"))
        in_use = _buffer_in_use() if smp.is_initialized() else 0
        return Held(Counter(descriptors), Counter(threads), Counter(maps), shared, resident - shared, in_use)

    @staticmethod
    def of(read: list[Any]) -> Held:
        """From JSON."""
        return Held(*read)


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Of what there is more afterwards, and how much."""
    return dict(collections.Counter(after) - collections.Counter(before))


def _buffer_in_use() -> int:
    """What stays in use of the buffer: threads of either rank may be about to free what they used last."""
    deadline = time.monotonic() + _REST_SECONDS
    while (used := int(smp.comm_stats()["buffer_used_bytes"])) and time.monotonic() < deadline:
        time.sleep(0.01)
    return used


def _descriptors() -> Iterator[str]:
    for path in (_SELF / "fd").iterdir():
        try:
            target = os.readlink(path)
        except OSError:
            continue  # the listing's own
        if not target.startswith("/proc/"):
            yield target


def _texts(paths: Iterator[Path]) -> Iterator[str]:
    for path in paths:
        try:
            yield path.read_text().strip()
        except OSError:  # it has just ended
            continue


def _kind(target: str) -> str:
    return _numberless(target.partition(":[")[0])


def _numberless(name: str) -> str:
    """Without what numbers something: process, job, segment."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", name)
