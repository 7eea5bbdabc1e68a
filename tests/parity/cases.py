"""The table of cases: which problem, on which grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from . import models_control, models_language, models_training, models_values, models_vision
from .problem import Problem

PROBLEMS: dict[str, Problem] = {
    **models_language.PROBLEMS,
    **models_vision.PROBLEMS,
    **models_control.PROBLEMS,
    **models_values.PROBLEMS,
    **models_training.PROBLEMS,
}


@dataclass(frozen=True)
class Case:
    """A problem on a grid.

    Attributes:
        problem: The problem's name.
        pp: The pipeline degree.
        dp: The data-parallel degree.
        schedule: The pipeline schedule.
        microbatches: The number of microbatches.
        average: Whether gradients are averaged over microbatches, not summed.
    """

    problem: str
    pp: int
    dp: int
    schedule: str
    microbatches: int
    average: bool = True

    @property
    def name(self) -> str:
        """A name without spaces, for choosing cases."""
        words = self.problem.replace(",", "").replace(" ", "-")
        total = "" if self.average else "-sum"
        return f"{words}-pp{self.pp}-dp{self.dp}-{self.schedule}-mb{self.microbatches}{total}"

    @property
    def topology(self) -> tuple[int, int]:
        """Cases with the same topology share a job."""
        return self.pp, self.dp


_GRIDS: dict[str, tuple[tuple[int, int, str, int], ...]] = {
    "GPT-2, changing length": ((2, 1, "interleaved", 2), (3, 2, "simple", 2)),
    "BERT": ((2, 1, "interleaved", 4), (3, 1, "simple", 2), (2, 2, "simple", 2)),
    "RoBERTa": ((2, 1, "simple", 4), (3, 1, "interleaved", 2)),
    "ALBERT": ((2, 1, "interleaved", 2), (3, 1, "interleaved", 4), (2, 2, "simple", 1)),
    "Llama": ((2, 1, "interleaved", 4), (3, 1, "simple", 2), (2, 2, "interleaved", 2)),
    "Mixtral": ((2, 1, "interleaved", 4), (3, 1, "interleaved", 2)),
    "Mixtral, router loss": ((2, 1, "simple", 2), (3, 1, "interleaved", 2)),
    "ResNet, in-place": ((2, 1, "simple", 4), (3, 1, "interleaved", 2), (2, 2, "interleaved", 2)),
    "ResNet, cut inside blocks": ((2, 1, "interleaved", 2), (3, 2, "interleaved", 4)),
    "ResNet of transformers": ((2, 1, "interleaved", 2),),
    "conditional": ((2, 1, "interleaved", 4), (3, 2, "simple", 4), (2, 2, "interleaved", 2)),
    "skip over two stages": ((3, 1, "interleaved", 4), (2, 2, "simple", 2)),
    "shared parameter": ((3, 1, "simple", 4), (2, 2, "interleaved", 1)),
    "nested spanning": ((3, 1, "interleaved", 4), (3, 1, "simple", 2), (3, 2, "interleaved", 2)),
    "visited many times": ((2, 1, "interleaved", 4), (3, 1, "simple", 2)),
    "branches": ((2, 2, "interleaved", 2), (3, 1, "interleaved", 4)),
    "long runs": ((2, 1, "interleaved", 2), (3, 1, "simple", 4)),
    "stage without parameters": ((3, 1, "interleaved", 2), (3, 2, "simple", 2)),
    "root without parameters": ((3, 1, "simple", 2), (3, 2, "interleaved", 2)),
    "GAN": ((2, 1, "interleaved", 4), (3, 1, "simple", 2), (2, 2, "simple", 2)),
    "gradient accumulation": ((2, 1, "interleaved", 2), (2, 2, "interleaved", 2)),
    "evaluation in between": ((2, 1, "simple", 4), (3, 1, "interleaved", 2)),
    "evaluation of a ResNet": ((2, 2, "interleaved", 2),),
    "frozen teacher": ((2, 1, "interleaved", 2), (3, 1, "simple", 4)),
    "frozen teacher, GPT-2": ((2, 1, "interleaved", 4),),
}
#: Problems that are not in the table above run on these, so that schedules and degrees come in turn.
_USUAL = ((2, 1, "interleaved", 4), (3, 1, "interleaved", 2), (2, 1, "simple", 2), (3, 1, "simple", 1))
#: Every schedule, degree and number of microbatches.
_FULL = ("GPT-2", "T5")
_SUMMED = (
    Case("GPT-2", 2, 1, "interleaved", 4, average=False),
    Case("two losses, summed", 2, 2, "simple", 2, average=False),
    Case("gradient accumulation", 2, 2, "interleaved", 4, average=False),
)


def all_cases() -> list[Case]:
    """Every case, those of one topology together."""
    return sorted(_cases(), key=lambda case: case.topology)


def _cases() -> Iterator[Case]:
    for problem in _FULL:
        yield from (
            Case(problem, pp, dp, schedule, microbatches)
            for pp, dp, schedule, microbatches in itertools.product(
                (2, 3), (1, 2), ("simple", "interleaved"), (1, 2, 4)
            )
        )
    usual = itertools.cycle(itertools.pairwise((*_USUAL, _USUAL[0])))
    for problem in PROBLEMS:
        if problem not in _FULL:
            grid = _GRIDS.get(problem) or next(usual)
            yield from (Case(problem, *place) for place in grid)
    yield from _SUMMED
