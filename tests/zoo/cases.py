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
#: What was done with the models before they are wrapped: every case has one of these.
_LIVES = (None, "looked", "collected", "trained", "copied", "loaded")
#: Whose forward cannot run without gradients.
_FEW_LIVES = {"gradient in the forward": (None, "trained")}
#: Whose forward draws an order of its patches, on which all but its result depends.
_DRAWN_ORDER = ("ViLT",)
#: The degree on which models are told to collect what they can.
_COLLECTING = 2


def all_cases(entries: Mapping[str, Entry]) -> list[Case]:
    """Every entry on each of its degrees, and some on random partitions; those of one degree together."""
    automatic = [_case(name, entry, degree) for name, entry in entries.items() for degree in entry.depths]
    random = [
        case
        for case in with_partitions(entries, _SEEDS)
        if zlib.crc32(f"{case.problem} {case.partition}".encode()) % _ONE_IN == 0
    ]
    return sorted([*automatic, *random], key=lambda case: case.topology)


def with_partitions(entries: Mapping[str, Entry], seeds: Iterable[int]) -> list[Case]:
    """Every entry that is not refused, once for each seed of a random partition, on its largest degree."""
    cases = [
        _case(name, entry, max(entry.depths), seed)
        for seed in seeds
        for name, entry in entries.items()
        if entry.refused is None
    ]
    return sorted(cases, key=lambda case: case.topology)


def _case(name: str, entry: Entry, degree: int, partition: int | None = None) -> Case:
    lives = (None,) if entry.refused else _FEW_LIVES.get(name, _LIVES)
    life = lives[zlib.crc32(f"{name} {degree} {partition}".encode()) % len(lives)]
    return Case(
        name,
        degree,
        1,
        _SCHEDULES[degree],
        MICROBATCHES,
        partition=partition,
        steps=STEPS,
        life=life,
        collects=partition is None and degree == _COLLECTING and not entry.refused and name not in _DRAWN_ORDER,
    )
