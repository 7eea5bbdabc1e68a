"""The table of faults: what goes wrong, in which layout of ranks, and at which moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

#: By name: the degrees of pipeline, tensor and data parallelism.
LAYOUTS: dict[str, tuple[int, int, int]] = {
    "pp2": (2, 1, 1),
    "pp4": (4, 1, 1),
    "dp2": (1, 1, 2),
    "tp2": (1, 2, 1),
    "pp2 dp2": (2, 1, 2),
    "pp2 tp2": (2, 2, 1),
}
#: Moments in the life of a job at which something happens to one rank, and the others go on.
MOMENTS = ("start", "forward", "backward", "hook", "reduction", "optimizer", "between steps", "end")
#: Within a training loop.
IN_LOOP = ("forward", "backward", "hook", "reduction", "optimizer", "between steps")

#: Faults that a script may catch, and then train on.
CAUGHT: dict[str, tuple[str, ...]] = {
    "raise": IN_LOOP,
    "raise a lone surrogate": IN_LOOP,
    "raise what cannot be printed": IN_LOOP,
    "raise 20 MB of text": ("forward", "backward", "hook"),
    "raise what takes no note": ("forward", "backward"),
    "interrupt": (*IN_LOOP, "before the update"),
    "sys.exit, caught": IN_LOOP,
    "out of memory": IN_LOOP,
    "out of memory in Python": ("forward", "backward", "hook"),
    "stop for 3 s": ("forward", "reduction", "between steps"),
    "worker's thread ends": ("forward",),
    "dropped model": ("between steps",),
    "other model": ("start",),
    "other step function": ("forward",),
    **{f"interrupt after {percent} %": ("anywhere",) for percent in range(5, 105, 10)},
}
#: Faults that end the rank.
ENDING = ("sys.exit", "os._exit", "kill -9", "stop for ever")
#: Moments of a save in the background, in its thread: on rank 0 before it hears of the others, and before it completes.
SAVING = ("save, before it has told", "save, when it has told")
#: A rank is lost right after a save, and the job is started anew with those that are left.
RESTARTED = "kill -9, started anew"
#: How a job starts that lacks something; on one rank, or on all of them.
SHORT = ("30 descriptors", "600 MB of address space more", "1 MB of a file", "no locked memory")


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        layout: The name of the layout.
        fault: What goes wrong.
        moment: When.
        rank: On which rank; -1 for all.
        ends: Whether the rank ends by it.
        starts: Whether it is there before the job starts.
        waits_by_contract: Whether the others wait for it by contract: a rank that is silent may come back until
            ``liveness_timeout_seconds`` have passed, a stopped one goes on by itself.
    """

    layout: str
    fault: str
    moment: str
    rank: int
    ends: bool = False
    starts: bool = False
    waits_by_contract: bool = False

    @property
    def world(self) -> int:
        """How many ranks the job has."""
        pp, tp, dp = LAYOUTS[self.layout]
        return pp * tp * dp

    @property
    def name(self) -> str:
        """For tables."""
        where = "all ranks" if self.rank < 0 else f"rank {self.rank}"
        return f"{self.layout}: {self.fault}, {self.moment}, {where}"

    def as_dict(self) -> dict[str, Any]:
        """For the ranks."""
        return asdict(self)


def _is_possible(layout: str, fault: str, moment: str) -> bool:
    pp, _, _ = LAYOUTS[layout]
    if fault in ("worker's thread ends", "other step function", "dropped model"):
        return pp > 1  # a pipeline of one rank has no workers, does not compare step functions, and needs its model
    if moment == "reduction" and LAYOUTS[layout][1:] == (1, 1):
        # There is none; a rank waits there for the others' votes, where no code of a script's runs that could raise.
        return fault in ("interrupt", "stop for 3 s")
    return True


def all_cases() -> list[Case]:
    """The whole table."""
    return [*_caught(), *_ending(), *_saving(), *_short()]


def _caught() -> Iterator[Case]:
    for layout in LAYOUTS:
        number = 0
        for fault, moments in CAUGHT.items():
            for moment in moments:
                if _is_possible(layout, fault, moment):
                    number += 1
                    last = _world(layout) - 1
                    rank = last if fault == "dropped model" else (0, last)[number % 2]
                    yield Case(layout, fault, moment, rank, waits_by_contract=fault.startswith("stop"))


def _ending() -> Iterator[Case]:
    for layout in LAYOUTS:
        number = 0
        for fault in ENDING:
            for moment in MOMENTS:
                number += 1
                rank = (0, _world(layout) - 1)[(number + MOMENTS.index(moment)) % 2]
                yield Case(layout, fault, moment, rank, ends=True, waits_by_contract=fault == "stop for ever")


def _saving() -> Iterator[Case]:
    for layout in ("pp2", "dp2", "pp2 dp2"):
        for fault in ("os._exit", "kill -9", "stop for ever"):
            for moment in SAVING:
                for rank in (0, _world(layout) - 1):
                    yield Case(layout, fault, moment, rank, ends=True, waits_by_contract=fault == "stop for ever")
    yield Case("pp2", RESTARTED, SAVING[0], 1, ends=True)
    yield Case("pp4", RESTARTED, SAVING[0], 3, ends=True)


def _short() -> Iterator[Case]:
    for layout in LAYOUTS:
        for fault in (*SHORT, "other configuration"):
            for rank in (-1, 0, _world(layout) - 1):
                if fault != "other configuration" or rank > 0:
                    yield Case(layout, fault, "start", rank, starts=True)


def _world(layout: str) -> int:
    pp, tp, dp = LAYOUTS[layout]
    return pp * tp * dp
