"""How strictly the microbatches of a job are kept in order, and what is put back where that was not strict enough."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardwright.errors import StateOrderError, StateWriteError
from shardwright.execution.kept import no_copy_of
from shardwright.execution.placed import Placed, placed_models
from shardwright.execution.task import may_overlap
from shardwright.execution.turn import Turn
from shardwright.scheduling import Scheduling

if TYPE_CHECKING:
    from shardwright.execution.stateful import StatefulModules
    from shardwright.job.runtime import Runtime


class StateOrder:
    """How strictly microbatches are kept in order: as strictly as the steps so far have shown to be needed.

    First a microbatch is past a module once it has been there as often as in the trace. If one comes back after that,
    the step is run again, and a microbatch is past once all its forwards are over; that step shows how often they come,
    which is counted on again. If that is wrong once more, it is not counted on any more. And where no order of forwards
    helps, microbatches run one after another.
    """

    def __init__(self) -> None:
        """Rely on the trace."""
        self.one_at_a_time = False
        #: Steps that were run again because a module had departed from what it did before.
        self.departures = 0
        self._learns = self._has_learnt = self._by_forwards = False

    def tighten(self, runtime: Runtime, error: StateOrderError) -> None:
        """A step broke the law, and is about to be run again."""
        follows_program = runtime[Scheduling].is_program
        if isinstance(error, StateWriteError) or self._by_forwards or follows_program:
            self.one_at_a_time = True
            return
        self._by_forwards = True
        self._learns = not self._has_learnt
        for kept in all_kept(placed_models(runtime)):
            kept.expect_counts(None)

    def end_step(self, runtime: Runtime) -> None:
        """A step has succeeded: how often its microbatches came is what will be expected of the next ones."""
        if not self._learns:
            return
        self._learns, self._has_learnt, self._by_forwards = False, True, False
        counts = {(model, state): count for model, state, count in runtime.server.stays()}
        for kept in all_kept(placed_models(runtime)):
            kept.expect_counts(counts)


def all_kept(placements: Iterable[Placed]) -> list[StatefulModules]:
    """What modules of these models keep here."""
    return [placement.kept for placement in placements if placement.kept is not None]


def one_at_a_time(runtime: Runtime) -> bool:
    """Whether microbatches have to run one after another, as far as is known."""
    return runtime[StateOrder].one_at_a_time or any(one.one_at_a_time for one in placed_models(runtime))


def splits_backward(runtime: Runtime) -> bool:
    """Whether weights' gradients are computed apart from what others wait for.

    Not where microbatches run one after another: a module may then write to what an earlier one has saved.
    """
    return runtime[Scheduling].splits_backward and not one_at_a_time(runtime)


def check_attributes(runtime: Runtime) -> None:
    """Raise :class:`StateWriteError` if some microbatches may have read a class's default where others had set more."""
    if not may_overlap(runtime):
        return
    found = runtime[Turn].attributes.set_by_some(runtime.step.num_microbatches)
    if found is not None:
        module, name = found
        raise StateWriteError(
            *(runtime.place.rank, socket.gethostname(), None, None, "forward", "StateWriteError"),
            f"attribute {name!r} of a {type(module).__name__} was set by some microbatches only, where the trace saw "
            "it set before it was read: the others may have read the default of the class where one process would find "
            "what an earlier one left",
        )


def rollback(runtime: Runtime) -> str | None:
    """Put back what modules keep, as it was before the step; why that could not be done, where it could not."""
    runtime[Turn].attributes.rollback()
    lost = [name for kept in all_kept(placed_models(runtime)) for name in kept.rollback()]
    if not lost:
        return None
    return f"step {runtime.step.number} failed on rank {runtime.place.rank}. {no_copy_of(lost)}".rstrip(".")
