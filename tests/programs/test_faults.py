"""Faults planted in the library are found by random programs, which says that those can find such faults at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shardwright.execution import exchange
from shardwright.execution.frame_table import FrameTable
from shardwright.frames import Frame, backward

from tests.programs.summary import Summary
from tests.programs.trials import jobs, try_seeds


def _lose_history_of_writes(patch: pytest.MonkeyPatch) -> None:
    """What a module wrote to its argument comes back as values only."""
    write_back: Callable[..., None] = exchange._write_back

    def without_history(frame: Any, tensor: Any, value: Any, in_grad_mode: bool) -> None:
        write_back(frame, tensor, value.detach(), False)

    patch.setattr(exchange, "_write_back", without_history)


def _watch_nothing_received(patch: pytest.MonkeyPatch) -> None:
    """A caller may write to a tensor that the module keeps."""
    patch.setattr(Frame, "watch", lambda *_: None)


def _watch_nothing_sent(patch: pytest.MonkeyPatch) -> None:
    """A module may write to a tensor of which its caller has a copy."""
    patch.setattr(FrameTable, "watch", lambda *_: None)


def _free_buffers_at_once(patch: pytest.MonkeyPatch) -> None:
    """A re-used module's graphs lose their buffers although another call's graph leads into them."""
    accumulate, capture = backward.accumulate, backward.capture
    patch.setattr(backward, "accumulate", lambda entering, _: accumulate(entering, False))
    patch.setattr(backward, "capture", lambda entering, targets, _: capture(entering, targets, False))


# Where the generator has changed, any ten seeds will do that find the fault: about one program in a hundred to two
# hundred shows it.
@pytest.mark.parametrize(
    ("plant", "seeds"),
    [
        (_lose_history_of_writes, range(8, 18)),
        (_watch_nothing_received, range(198, 208)),
        (_watch_nothing_sent, range(375, 385)),
        (_free_buffers_at_once, range(135, 145)),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jobs() as on:
        assert not Summary(list(try_seeds(seeds, on))).failures, "the programs are good without the fault"
        plant(monkeypatch)
        assert Summary(list(try_seeds(seeds, on))).failures
