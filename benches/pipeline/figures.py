"""From measured times to the table, ratios and missed bars; nothing here measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benches.pipeline.cases import CostKind, Schedule

#: The least fraction of the ideal, by milliseconds of a unit; ``zero_bubble`` has one of its own at 40 ms.
FRACTION_BARS = {40.0: 0.98, 5.0: 0.93}
ZERO_BUBBLE_BAR = 0.96


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case: what a step took, and what it would take without any overhead, all in seconds.

    Attributes:
        ours: None where the library does not have the schedule.
    """

    ranks: int
    unit_ms: float
    costs: CostKind
    schedule: Schedule
    ours: float | None
    ours_ideal: float
    torch: float
    torch_ideal: float

    @property
    def ours_fraction(self) -> float | None:
        """Of the ideal of the library's schedule."""
        return None if self.ours is None else self.ours_ideal / self.ours

    @property
    def torch_fraction(self) -> float:
        """Of the ideal of torch's schedule."""
        return self.torch_ideal / self.torch

    @property
    def time_ratio(self) -> float | None:
        """The library's time over torch's."""
        return None if self.ours is None else self.ours / self.torch

    @property
    def bar(self) -> float | None:
        """The least fraction of the ideal; None where only torch is to be beaten."""
        if self.schedule == "zero_bubble" and self.unit_ms == 40.0:
            return ZERO_BUBBLE_BAR
        return FRACTION_BARS.get(self.unit_ms)

    @property
    def name(self) -> str:
        """For the sentences of :meth:`missed`."""
        return f"{self.ranks} ranks, {self.unit_ms:g} ms, {self.costs}, {self.schedule}"

    def missed(self) -> list[str]:
        """A clause for each bar that is not met."""
        fraction, ratio = self.ours_fraction, self.time_ratio
        if fraction is None or ratio is None:
            return ["the library has no such schedule"]
        sentences = []
        if self.bar is not None and fraction < self.bar:
            sentences.append(f"{fraction:.3f} of the ideal, the bar is >= {self.bar:g}")
        if fraction <= self.torch_fraction:
            sentences.append(f"{fraction:.3f} of the ideal, torch reaches {self.torch_fraction:.3f}")
        if ratio >= 1.0:
            sentences.append(f"{ratio:.3f} of torch's time, the bar is < 1")
        return sentences

    def as_json(self) -> dict[str, Any]:
        """Fractions of the ideal, and the ratio of times."""
        return {
            "ranks": self.ranks,
            "unit_ms": self.unit_ms,
            "costs": self.costs,
            "schedule": self.schedule,
            "ours": _rounded(self.ours_fraction),
            "torch": _rounded(self.torch_fraction),
            "time_ratio": _rounded(self.time_ratio),
        }


HEADER = (
    f"{'ranks':>5}{'unit ms':>9}  {'costs':8}{'schedule':14}{'ideal ms':>9}{'ours ms':>9}{'ours':>7}"
    f"{'ideal ms':>11}{'torch ms':>9}{'torch':>7}{'time ours/torch':>17}"
)


def line(row: Row) -> str:
    """A row of the table."""

    def milliseconds(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e3 * seconds:.1f}"

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    return (
        f"{row.ranks:5}{row.unit_ms:9g}  {row.costs:8}{row.schedule:14}"
        f"{milliseconds(row.ours_ideal):>9}{milliseconds(row.ours):>9}{ratio(row.ours_fraction):>7}"
        f"{milliseconds(row.torch_ideal):>11}{milliseconds(row.torch):>9}{ratio(row.torch_fraction):>7}"
        f"{ratio(row.time_ratio):>17}"
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
