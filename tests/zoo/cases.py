"""Where each entry runs."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from tests.parity.cases import Case

from .entry import Entry

STEPS = 3
MICROBATCHES = 4
#: The schedule for each pipeline degree, so that both are used.
_SCHEDULES = {2: "interleaved", 3: "interleaved", 4: "simple"}
#: Seeds of random partitions, each for one in so many entries.
_SEEDS = (1, 2, 3)
_ONE_IN = 8


def all_cases(entries: Mapping[str, Entry]) -> list[Case]:
    """Every entry on each of its degrees, and some on random partitions; those of one degree together."""
    automatic = [_case(name, degree) for name, entry in entries.items() for degree in entry.depths]
    random = [
        case
        for case in with_partitions(entries, _SEEDS)
        if zlib.crc32(f"{case.problem} {case.partition}".encode()) % _ONE_IN == 0
    ]
    return sorted([*automatic, *random], key=lambda case: case.topology)


def with_partitions(entries: Mapping[str, Entry], seeds: Iterable[int]) -> list[Case]:
    """Every entry that is not refused, once for each seed of a random partition, on its largest degree."""
    cases = [
        _case(name, max(entry.depths), seed)
        for seed in seeds
        for name, entry in entries.items()
        if entry.refused is None
    ]
    return sorted(cases, key=lambda case: case.topology)


def _case(name: str, degree: int, partition: int | None = None) -> Case:
    return Case(name, degree, 1, _SCHEDULES[degree], MICROBATCHES, partition=partition, steps=STEPS)
