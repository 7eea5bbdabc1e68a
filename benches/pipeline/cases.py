"""What is measured: schedules, costs and units, and where stages lie."""

from __future__ import annotations

from typing import Literal

from benches.pipeline.ideal import Policy, StageCosts

Schedule = Literal["simple", "interleaved", "zero_bubble", "looped"]
CostKind = Literal["even", "uneven"]

SCHEDULES: tuple[Schedule, ...] = ("simple", "interleaved", "zero_bubble", "looped")
UNITS_MS = (40.0, 5.0, 1.0)
RANKS = (2, 4)
#: Uneven costs: a rank's stages take this many times those of an even one.
FACTORS: dict[CostKind, tuple[float, ...]] = {"even": (1.0,) * 4, "uneven": (1.0, 1.5, 0.75, 1.25)}
#: Stages on a rank: one after the other round the ranks.
LOOPS: dict[Schedule, int] = {"simple": 1, "interleaved": 1, "zero_bubble": 1, "looped": 2}
#: The library's value of ``pipeline``.
POLICY: dict[Schedule, Policy] = {
    "simple": "simple",
    "interleaved": "interleaved",
    "zero_bubble": "zero_bubble",
    "looped": "looped",
}


def active_microbatches(schedule: Schedule, num_ranks: int) -> int:
    """The library's ``active_microbatches``: its default, and for looped stages as many as they can use."""
    return 2 * num_ranks if schedule == "looped" else num_ranks + 2


def placement(num_ranks: int, loops: int) -> list[int]:
    """By stage, its rank."""
    return list(range(num_ranks)) * loops


def costs_of(num_ranks: int, loops: int, kind: CostKind, unit_ms: float) -> list[StageCosts]:
    """By stage, in seconds: forward, input gradient and weight gradient take a unit times the rank's factor."""
    seconds = [1e-3 * unit_ms * FACTORS[kind][rank] for rank in placement(num_ranks, loops)]
    return [StageCosts(each, each, each) for each in seconds]
