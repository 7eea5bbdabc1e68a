"""From measured steps to the table, ratios and missed bars; nothing here measures."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benches.communication.figures import Bar

#: Of the losses of two configurations, relative.
LOSS_TOLERANCE = 1e-4
BARS = {
    "vs_torch_1f1b": Bar(">=", 1.08),
    "vs_half_batches": Bar(">=", 0.96),
    "interleaved_vs_torch_1f1b": Bar(">=", 1.0),
    "memory_vs_torch_1f1b": Bar("<=", 1.05),
    "vs_torch_best": Bar(">=", 1.05),
    "memory_vs_torch_best": Bar("<=", 1.1),
}
OURS, TORCH_1F1B, OUR_INTERLEAVED = "ours/", "torch/1f1b/", "ours/interleaved/"
TORCH, TORCH_ZERO_BUBBLE = "torch/", "torch/zero_bubble/"


@dataclass
class Measured:
    """What was seen of one configuration.

    Attributes:
        seconds: Of each step that counts.
        losses: Of the first steps.
        peak_bytes: By rank, where its processes hold no other configuration.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: list[int] | None = None

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


def times_as_fast(one: Measured, than: Measured) -> float:
    """How many times as fast one is as another in its group: the median over the rounds."""
    return statistics.median(b / a for a, b in zip(one.seconds, than.seconds, strict=True))


def named(group: Mapping[str, Measured], beginning: str) -> list[str]:
    """The configurations whose names begin so."""
    return [name for name in group if name.startswith(beginning)]


def figures(groups: Sequence[Mapping[str, Measured]]) -> dict[str, float | None]:
    """The figures that have a bar, each of the fastest of ours over all groups, beside what it is compared with there.

    Speeds are above 1 where the library is faster. Memory is that of the fastest ``interleaved``, rank by rank,
    the smaller with the smaller: which rank does what depends on the split. ``torch_best`` is the fastest of torch's
    schedules where its zero-bubble runs, beside the fastest of ours there.
    """
    vs_torch_best, memory_vs_torch_best = _beside_torch_best(groups)
    return {
        "vs_torch_1f1b": _best(groups, OURS, TORCH_1F1B),
        "vs_half_batches": _best(groups, OURS, "halves"),
        "interleaved_vs_torch_1f1b": _best(groups, OUR_INTERLEAVED, TORCH_1F1B),
        "memory_vs_torch_1f1b": _memory_ratio(groups),
        "vs_torch_best": vs_torch_best,
        "memory_vs_torch_best": memory_vs_torch_best,
    }


def _best(groups: Sequence[Mapping[str, Measured]], beginning: str, beside: str) -> float | None:
    ratios = [
        min(times_as_fast(group[name], group[other]) for other in others)
        for group in groups
        if (others := named(group, beside))
        for name in named(group, beginning)
    ]
    return max(ratios, default=None)


def _memory_ratio(groups: Sequence[Mapping[str, Measured]]) -> float | None:
    found = [
        (times_as_fast(group[name], group[other]), memory)
        for group in groups
        for name, other in itertools.product(named(group, OUR_INTERLEAVED), named(group, TORCH_1F1B))
        if (memory := _times_as_large(group[name], group[other])) is not None
    ]
    return max(found)[1] if found else None


def _times_as_large(one: Measured, than: Measured) -> float | None:
    if one.peak_bytes is None or than.peak_bytes is None:
        return None
    return max(a / b for a, b in zip(sorted(one.peak_bytes), sorted(than.peak_bytes), strict=True))


def _beside_torch_best(groups: Sequence[Mapping[str, Measured]]) -> tuple[float | None, float | None]:
    found = []
    for group in groups:
        if not named(group, TORCH_ZERO_BUBBLE):
            continue
        best = min(named(group, TORCH), key=lambda name: group[name].median)
        for name in named(group, OURS):
            found.append((times_as_fast(group[name], group[best]), _times_as_large(group[name], group[best])))
    return max(found, key=lambda pair: pair[0], default=(None, None))


def disagreements(group: Mapping[str, Measured], expected: Sequence[float]) -> list[str]:
    """A sentence for each configuration whose first losses are not those expected.

    The second one tells whether gradients and optimizer were right; two independent halves have their own.
    """
    sentences = []
    for name, one in group.items():
        steps = 1 if name == "halves" else 2
        for step, (found, right) in enumerate(zip(one.losses[:steps], expected[:steps], strict=True), 1):
            if not abs(found - right) <= LOSS_TOLERANCE * abs(right):
                sentences.append(f"wrong: {name} has a loss of {found:.6f} in step {step}, not {right:.6f}")
    return sentences


def table(groups: Sequence[Mapping[str, Measured]], refused: Sequence[str]) -> str:
    """A line for each configuration; ratios are speeds beside others of the same group."""
    lines = [f"{'configuration':32}{'s/step':>9}{'x torch 1F1B':>14}{'x halves':>10}{'peak MB, rank 0/1':>20}"]
    for group in groups:
        for name, one in group.items():
            memory = "-" if one.peak_bytes is None else "/".join(f"{each / 1e6:.0f}" for each in one.peak_bytes)
            torch = min((times_as_fast(one, group[other]) for other in named(group, TORCH_1F1B)), default=math.nan)
            halves = times_as_fast(one, group["halves"]) if "halves" in group else math.nan
            lines.append(f"{name:32}{one.median:9.3f}{torch:14.3f}{halves:10.3f}{memory:>20}")
        lines.append("")
    lines += [f"{name:32}{'-':>9}{'-':>14}{'-':>10}{'-':>20}" for name in refused]
    return "\n".join(lines).rstrip()
