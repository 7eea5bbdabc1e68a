"""How strictly microbatches are ordered in modules with state, and the rollback of such state."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardwright.errors import StateOrderError, StateWriteError
from shardwright.execution.kept import no_copy_of
from shardwright.execution.placed import Placed, placed_models
from shardwright.execution.task import may_overlap
from shardwright.execution.turn import Turn
from shardwright.execution.untraced import UntracedState, not_undone
from shardwright.scheduling import Scheduling

if TYPE_CHECKING:
    from shardwright.execution.stateful import StatefulModules
    from shardwright.job.runtime import Runtime


class StateOrder:
    """How strictly microbatches are ordered, as required by the steps so far.

    At first, a microbatch has finished with a module once it has called it as often as the trace did. If it calls the
    module again, the step is run again, and a microbatch has finished once all its forwards are over. That step counts
    the calls, and later steps expect these counts. If the counts are wrong again, they are no longer used. If no order
    of forwards is correct, microbatches run one after another.
    """

    def __init__(self) -> None:
        """Create the initial order, which uses the counts of the trace."""
        self.one_at_a_time = False
        #: Steps that were run again because a module behaved differently from before.
        self.departures = 0
        self._learns = self._has_learnt = self._by_forwards = False

    def tighten(self, runtime: Runtime, error: StateOrderError) -> None:
        """Tighten the order after a step that must be run again."""
        follows_program = runtime[Scheduling].is_program
        if isinstance(error, StateWriteError) or self._by_forwards or follows_program:
            self.one_at_a_time = True
            return
        self._by_forwards = True
        self._learns = not self._has_learnt
        for kept in all_kept(placed_models(runtime)):
            kept.expect_counts(None)

    def end_step(self, runtime: Runtime) -> None:
        """Handle a successful step. If it counted module calls, expect its counts in the next steps."""
        if not self._learns:
            return
        self._learns, self._has_learnt, self._by_forwards = False, True, False
        counts = {(model, state): count for model, state, count in runtime.server.stays()}
        for kept in all_kept(placed_models(runtime)):
            kept.expect_counts(counts)


def all_kept(placements: Iterable[Placed]) -> list[StatefulModules]:
    """Return the local modules with state of these models."""
    return [placement.kept for placement in placements if placement.kept is not None]


def all_untraced(placements: Iterable[Placed]) -> list[UntracedState]:
    """Return what the modules of those of these models hold that one rank runs whole."""
    return [placement.untraced for placement in placements if placement.untraced is not None]


def all_states(placements: Iterable[Placed]) -> list[StatefulModules | UntracedState]:
    """Return what is told of the beginning and the end of each step."""
    placements = list(placements)
    return [*all_kept(placements), *all_untraced(placements)]


def needs_one_at_a_time(runtime: Runtime) -> bool:
    """Return whether microbatches must run one after another, as far as this rank knows before a step.

    The root decides for its peers: a model that the script has dropped may still be there on some ranks.
    """
    return runtime[StateOrder].one_at_a_time or any(one.one_at_a_time for one in placed_models(runtime))


def splits_backward(runtime: Runtime, microbatch: int) -> bool:
    """Return whether weight gradients of a microbatch are computed separately.

    They are not if microbatches run one after another, because a module may then write to tensors that an earlier
    microbatch has saved.
    """
    splits = runtime[Scheduling].splits(microbatch, runtime.step.num_microbatches)
    return splits and not runtime.server.keeps_one_at_a_time()


def check_attributes(runtime: Runtime) -> None:
    """Raise :class:`StateWriteError` if only some microbatches set an attribute that has a default in its class."""
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
    """Restore the state of modules from before the step; return the reason if this is not possible."""
    runtime[Turn].attributes.rollback()
    models = placed_models(runtime)
    failed = f"step {runtime.step.number} failed on rank {runtime.place.rank}"
    if lost := [name for untraced in all_untraced(models) for name in untraced.rollback()]:
        return f"{failed}. {not_undone(lost)}"
    lost = [name for kept in all_kept(models) for name in kept.rollback()]
    return f"{failed}. {no_copy_of(lost)}".rstrip(".") if lost else None
