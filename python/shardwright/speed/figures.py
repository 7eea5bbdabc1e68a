"""Where the time of some steps went on all ranks, and what one rank alone would need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Below this gain one rank may be as fast: what it would take is an upper bound, with the library's work for messages.
_LEAST_GAIN = 1.25


class RankTime(NamedTuple):
    """Seconds of a rank in some steps.

    Attributes:
        steps: The number of steps.
        total: All of their time.
        computing: In tasks, without sending.
        waiting: Nothing could run.
        moving: Messages were handed to the transport.
    """

    steps: int
    total: float
    computing: float
    waiting: float
    moving: float

    @staticmethod
    def of(figures: Mapping[str, Any]) -> RankTime:
        """Take the times from ``Usage.figures()``."""
        tasks = sum(figures[f"{kind}_seconds"] for kind in ("forward", "backward", "weight", "other"))
        moving = figures["sending_seconds"]
        waiting = sum(figures["waiting_seconds"].values())
        return RankTime(figures["steps"], figures["seconds"], max(tasks - moving, 0.0), waiting, moving)

    def since(self, before: RankTime) -> RankTime:
        """Return the time of the steps after those of ``before``."""
        steps, *seconds = (now - then for now, then in zip(self, before, strict=True))
        return RankTime(int(steps), *seconds)


class Division(NamedTuple):
    """How a model is divided.

    Attributes:
        pipeline: The pipeline parallel degree.
        tensor: The tensor parallel degree.
        microbatches: Into how many parts a batch is divided.
    """

    pipeline: int
    tensor: int
    microbatches: int

    def seconds(self, work: float, step: float) -> dict[int, float]:
        """Estimate how long a step takes at each lower pipeline degree that divides this one.

        Work is divided evenly, a pipeline fills and drains, and each boundary between stages costs what it costs now.

        Args:
            work: What all ranks of a replica compute in a step.
            step: How long a step takes now.
        """

        def busy(degree: int) -> float:
            return work / (self.tensor * degree) * (self.microbatches + degree - 1) / self.microbatches

        boundary = max(step - busy(self.pipeline), 0.0) / (self.pipeline - 1)
        lower = [degree for degree in range(1, self.pipeline) if self.pipeline % degree == 0]
        return {degree: busy(degree) + boundary * (degree - 1) for degree in lower}


def speed_line(ranks: Sequence[RankTime], division: Division) -> str:
    """Describe in one line how long a step takes, what ranks do meanwhile, and what one rank alone would take.

    Where dividing does not pay, it says at which lower degree a step is fastest.

    Args:
        ranks: The times of all ranks, in the same steps.
        division: How the model is divided over them.
    """
    steps, total = ranks[0].steps, sum(rank.total for rank in ranks)
    step = ranks[0].total / steps
    alone = sum(rank.computing for rank in ranks) / steps
    computing, waiting, moving = (
        sum(getattr(rank, use) for rank in ranks) / total for use in ("computing", "waiting", "moving")
    )
    rest = max(1.0 - computing - waiting - moving, 0.0)
    text = (
        f"a step takes {_duration(step)} on {len(ranks)} ranks, of which they compute {computing:.0%}, wait "
        f"{waiting:.0%}, move data {moving:.0%} and need {rest:.0%} for the rest; one rank alone would take at most "
        f"about {_duration(alone)}"
    )
    # A replica's part of the batch is what an undivided model would compute on each rank.
    work = alone * division.pipeline * division.tensor / len(ranks)
    if work >= _LEAST_GAIN * step:
        return f"{text}, {alone / step:.1f} times as long"
    pays = "hardly pays" if work > step else "does not pay"
    estimates = division.seconds(work, step)
    best = min(estimates, key=lambda degree: estimates[degree])
    if best == 1:
        better = "if it fits in the memory of one rank, pipeline_parallel_degree 1 is better"
    else:
        better = f"pipeline_parallel_degree {best} is better, with steps of about {_duration(estimates[best])}"
    return f"{text}: dividing this model {pays} in time; {better}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
