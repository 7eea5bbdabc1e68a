"""From measured times to a table, figures and missed bars; nothing here measures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from benches.communication.figures import Bar

BARS = {"import_s": Bar("<", 0.3), "init_s": Bar("<", 0.2), "first_step_ratio": Bar("<=", 1.5)}


@dataclass
class Measured:
    """What each run gave, in seconds.

    Attributes:
        torch_import: Of ``import torch``.
        our_import: Of ``import shardwright`` after it.
        init: Of ``smp.init``, on the slower rank.
        our_steps: Of each step of the pipeline, from the first rank's begin to the last one's end.
        plain_steps: Of the same steps in one process.
        phases: Of the phases of rank 0's start, by what they say.
    """

    torch_import: list[float] = field(default_factory=list)
    our_import: list[float] = field(default_factory=list)
    init: list[float] = field(default_factory=list)
    our_steps: list[list[float]] = field(default_factory=list)
    plain_steps: list[list[float]] = field(default_factory=list)
    phases: list[Mapping[str, float]] = field(default_factory=list)


def figures(measured: Measured) -> dict[str, float]:
    """Medians over the runs; the ratio is taken within each run, whose processes had the same machine."""
    return {
        "import_s": statistics.median(measured.our_import),
        "init_s": statistics.median(measured.init),
        "first_step_ratio": statistics.median(_ratios(measured, 0)),
    }


def _ratios(measured: Measured, step: int) -> list[float]:
    return [ours[step] / plain[step] for ours, plain in zip(measured.our_steps, measured.plain_steps, strict=True)]


def table(measured: Measured) -> Table:
    """Medians, the least and the most of each quantity, in seconds."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("what a user waits for")
    for header in ("median", "least", "most"):
        made.add_column(header, justify="right")

    def row(label: str, values: Sequence[float], unit: str = "s") -> None:
        shown = (statistics.median(values), min(values), max(values))
        made.add_row(label, *(f"{value:.3f} {unit}".rstrip() for value in shown))

    row("import torch", measured.torch_import)
    row("import shardwright, after it", measured.our_import)
    row("smp.init, the slower of two ranks", measured.init)
    for step in range(len(measured.our_steps[0])):
        row(f"step {step + 1}, plain PyTorch", [steps[step] for steps in measured.plain_steps])
        row(f"step {step + 1}, two ranks", [steps[step] for steps in measured.our_steps])
        row(f"step {step + 1}, two ranks over plain", _ratios(measured, step), unit="")
    for phase in measured.phases[0]:
        row(f"  rank 0: {phase}", [phases[phase] for phases in measured.phases])
    return made
