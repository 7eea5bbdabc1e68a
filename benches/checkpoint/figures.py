"""From measured times to a table, figures and missed bars; nothing here measures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from benches.communication.figures import Bar

BARS = {
    "save_vs_copy": Bar(">=", 0.8),
    "load_vs_copy": Bar(">=", 0.8),
    "save_vs_torch": Bar(">", 1.0),
    "load_vs_torch": Bar(">", 1.0),
    "save_vs_dcp": Bar(">", 1.0),
    "load_vs_dcp": Bar(">", 1.0),
    "async_block_vs_memcpy": Bar("<", 1.5),
    "reshard_bytes_read": Bar("<=", 1.001),
}


@dataclass
class Measured:
    """What each round gave, in seconds.

    Attributes:
        save: Of a save until it is on the disk, by who saves.
        load: Of a load from the disk, by who loads.
        memcpy: Of one copy of the state into memory that is used already.
        block: How long a save in the background keeps its caller.
        reshard: How long a replica takes to load what two stages of a pipeline saved.
        read: The bytes it reads for that, in sizes of the state; files have headers besides.
        memory: What our save, load and save in the background add to the process's peak, in bytes.
    """

    save: dict[str, list[float]] = field(default_factory=dict)
    load: dict[str, list[float]] = field(default_factory=dict)
    memcpy: list[float] = field(default_factory=list)
    block: list[float] = field(default_factory=list)
    reshard: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)


def _times_as_fast(times: dict[str, list[float]], other: str) -> float:
    """How many times as fast as another one we are: the median of the rounds, each with its own ratio."""
    return statistics.median(theirs / ours for theirs, ours in zip(times[other], times["ours"], strict=True))


def figures(measured: Measured) -> dict[str, float]:
    """Medians over the rounds of ratios within a round."""
    found = {}
    for what in ("save", "load"):
        for other in ("copy", "torch", "dcp"):
            found[f"{what}_vs_{other}"] = _times_as_fast(getattr(measured, what), other)
    blocked = zip(measured.block, measured.memcpy, strict=True)
    found["async_block_vs_memcpy"] = statistics.median(block / copy for block, copy in blocked)
    found["reshard_bytes_read"] = max(measured.read)
    return found


def table(measured: Measured, nbytes: int) -> Table:
    """Median, least and most of each, and the speed that the median is."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("what")
    for header in ("median", "least", "most", "speed"):
        made.add_column(header, justify="right")

    def row(label: str, values: Sequence[float]) -> None:
        median = statistics.median(values)
        shown = (median, min(values), max(values))
        made.add_row(label, *(f"{value:.2f} s" for value in shown), f"{nbytes / median / 2**30:.2f} GiB/s")

    for what in ("save", "load"):
        for who, values in getattr(measured, what).items():
            row(f"{what}: {who}", values)
    row("load of two pipeline ranks' checkpoint by a replica", measured.reshard)
    row("one copy in memory", measured.memcpy)
    row("a save in the background keeps its caller", measured.block)
    for what, peaks in measured.memory.items():
        made.add_row(f"memory added by our {what}", f"{max(peaks) / 2**20:.0f} MiB")
    return made
