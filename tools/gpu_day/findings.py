"""What a step has found: figures, what has to hold, and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Findings:
    """Collects a step's figures and judges them.

    Attributes:
        figures: By name.
        failures: What did not hold, in words.
        bars: By the name of its figure, a bar in words, the figure, and whether it holds; None where it is not judged.
    """

    def __init__(self) -> None:
        """Nothing is found yet."""
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []
        self.bars: dict[str, dict[str, Any]] = {}

    def add(self, figures: Mapping[str, Any], prefix: str = "") -> None:
        """Take figures over, each with a prefix before its name."""
        self.figures |= {f"{prefix}{name}": _rounded(value) for name, value in figures.items()}

    def expect(self, holds: bool, text: str) -> None:
        """Note a failure, unless something holds."""
        if not holds:
            self.failures.append(text)

    def exact(self, name: str, answers: Sequence[Mapping[str, Any]], error: str) -> None:
        """Note how far a case is from one process, as its ranks have compared.

        Args:
            name: Of the case.
            answers: By rank, what :func:`tools.gpu_day.training.difference` returned; empty if the case failed.
            error: How it failed.
        """
        self.expect(not error, f"{name}: {error}")
        if not answers:
            return
        self.add({f"{name}_error": max(answer["error"] for answer in answers)})
        self.add({f"{name}_bitwise": all(answer["bitwise"] for answer in answers)})
        for rank, answer in enumerate(answers):
            text = f"{name}: rank {rank} is off by {answer['error']:.3g} at {answer['where']} {answer['wrong']}"
            self.expect(answer["exact"], text.rstrip())

    def at_most(self, name: str, figure: float, bar: float, *, judged: bool) -> None:
        """Note a figure and the most that it may be; where the bar is not judged, only what it is."""
        self._bar(name, figure, f"<= {bar:g}", figure <= bar, judged)

    def at_least(self, name: str, figure: float, bar: float, *, judged: bool) -> None:
        """Note a figure and the least that it may be; where the bar is not judged, only what it is."""
        self._bar(name, figure, f">= {bar:g}", figure >= bar, judged)

    def _bar(self, name: str, figure: float, bar: str, holds: bool, judged: bool) -> None:
        self.add({name: figure})
        self.bars[name] = {"bar": bar, "figure": _rounded(figure), "holds": holds if judged else None}
        if judged:
            self.expect(holds, f"{name} is {figure:.4g}; the bar is {bar}")

    def result(self) -> dict[str, Any]:
        """Return what a step returns."""
        return {
            **self.figures,
            "failures": "; ".join(self.failures),
            "bars": self.bars,
            "passed": not self.failures,
        }


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
