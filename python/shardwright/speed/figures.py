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


def speed_line(ranks: Sequence[RankTime]) -> str:
    """Describe in one line how long a step takes, what ranks do meanwhile, and what one rank alone would take.

    Args:
        ranks: The times of all ranks, in the same steps.
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
    if alone >= _LEAST_GAIN * step:
        return f"{text}, {alone / step:.1f} times as long"
    pays = "hardly pays" if alone > step else "does not pay"
    return (
        f"{text}: dividing this model {pays} in time; if it fits in the memory of one rank, pipeline_parallel_degree 1 "
        "is better"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
