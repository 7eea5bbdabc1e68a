"""From measured times to tables, ratios and missed bars; nothing here measures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
SIZES: dict[int, str] = {64: "64 B", 4 * KIB: "4 KiB", 256 * KIB: "256 KiB", 4 * MIB: "4 MiB", 64 * MIB: "64 MiB"}

MEMCPY = "memcpy"
OURS = "Shardwright"
OURS_ASLEEP = "Shardwright, receiver asleep"
IN_RUST = "Shardwright in Rust, spinning"
GLOO = "Gloo"
GLOO_ASLEEP = "Gloo, receiver asleep"
MPI = "Open MPI"
UCX = "ucx_perftest"
UCX_BEST = "ucx_perftest, best"


@dataclass(frozen=True)
class Bar:
    """What a figure has to reach: at least or at most a limit, or more or less than it."""

    sign: str
    limit: float

    def is_met(self, figure: float | None) -> bool:
        """A figure that could not be taken misses its bar."""
        if figure is None:
            return False
        met = {
            ">=": figure >= self.limit,
            ">": figure > self.limit,
            "<=": figure <= self.limit,
            "<": figure < self.limit,
        }
        return met[self.sign]


BARS = {
    "stream64m_vs_ucx": Bar(">=", 0.75),
    "stream4m_vs_ucx": Bar(">=", 0.5),
    "stream64m_vs_gloo": Bar(">=", 2.0),
    "stream4m_vs_gloo": Bar(">=", 3.0),
    "lat4k_vs_gloo": Bar("<=", 0.75),
    "lat4k_spin_us": Bar("<", 8.0),
}
IDLE_BARS = {"idle_core_share": Bar("<", 0.01), "overlap_ratio": Bar("<=", 1.03)}


@dataclass
class Measured:
    """One quantity of every path and size: what each round gave.

    Attributes:
        rounds: By path and bytes of a message.
    """

    rounds: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    def add(self, path: str, size: int, figure: float) -> None:
        """Keep what a round gave."""
        self.rounds.setdefault(path, {}).setdefault(size, []).append(figure)

    def median(self, path: str, size: int) -> float | None:
        """Over the rounds; None when none gave a figure."""
        figures = self.rounds.get(path, {}).get(size)
        return statistics.median(figures) if figures else None

    def add_best(self, path: str, beginning: str, best: str) -> None:
        """Make a path of the best one of those whose names begin alike, at each size: "min" or "max" of medians."""
        candidates = [name for name in self.rounds if name.startswith(beginning)]
        for size in SIZES:
            medians = [found for name in candidates if (found := self.median(name, size)) is not None]
            if medians:
                self.rounds.setdefault(path, {})[size] = [min(medians) if best == "min" else max(medians)]


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Of two figures; None when one of them is missing."""
    return None if numerator is None or not denominator else numerator / denominator


def compare(latency: Measured, bandwidth: Measured) -> dict[str, float | None]:
    """The figures that have a bar."""

    def stream(size: int, path: str) -> float | None:
        return ratio(bandwidth.median(OURS, size), bandwidth.median(path, size))

    return {
        "stream64m_vs_ucx": stream(64 * MIB, UCX_BEST),
        "stream4m_vs_ucx": stream(4 * MIB, UCX_BEST),
        "stream64m_vs_gloo": stream(64 * MIB, GLOO),
        "stream4m_vs_gloo": stream(4 * MIB, GLOO),
        "lat4k_vs_gloo": ratio(latency.median(OURS_ASLEEP, 4 * KIB), latency.median(GLOO_ASLEEP, 4 * KIB)),
        "lat4k_spin_us": latency.median(IN_RUST, 4 * KIB),
    }


def missed(figures: Mapping[str, float | None], bars: Mapping[str, Bar]) -> list[str]:
    """A sentence for each bar that is not met."""
    sentences = []
    for name, bar in bars.items():
        figure = figures[name]
        if not bar.is_met(figure):
            measured = "could not be measured" if figure is None else f"is {figure:.4g}"
            sentences.append(f"missed: {name} {measured}, the bar is {bar.sign} {bar.limit:g}")
    return sentences


def conclude(figures: Mapping[str, float | None], bars: Mapping[str, Bar]) -> int:
    """Print what is missed, and the figures as JSON on the last line; the exit status."""
    sentences = missed(figures, bars)
    for sentence in sentences:
        print(sentence)
    print(json.dumps(figures), flush=True)
    return 1 if sentences else 0


def in_digits(figure: float | None) -> str:
    """Three digits that count; a dash for what was not measured."""
    if figure is None:
        return "-"
    for limit, digits in ((1, 3), (10, 2), (100, 1)):
        if abs(figure) < limit:
            return f"{figure:.{digits}f}"
    return f"{figure:.0f}"


def table(title: str, measured: Measured, paths: Sequence[str], sizes: Sequence[int]) -> str:
    """Rows are paths, columns are sizes."""
    shown = [path for path in paths if path in measured.rounds]
    wide = max(len(title), *(len(path) for path in shown))
    lines = [title.ljust(wide) + "".join(SIZES[size].rjust(10) for size in sizes)]
    for path in shown:
        lines.append(path.ljust(wide) + "".join(in_digits(measured.median(path, size)).rjust(10) for size in sizes))
    return "\n".join(lines)
