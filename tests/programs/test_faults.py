"""Faults planted in the library are found by random programs, which says that those can find such faults at all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
from shardwright.execution import exchange
from shardwright.execution.frame_table import FrameTable
from shardwright.frames import Frame, backward

from tests.programs.optimizers import Updating
from tests.programs.running import run_plain
from tests.programs.summary import Summary
from tests.programs.trials import draw_program, jobs, try_program, try_seeds


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


def _resume_without_optimizer(patch: pytest.MonkeyPatch) -> None:
    """The job that goes on has no state of the optimizer."""
    resume = functools.partial(smp.resume_from_checkpoint, load_optimizer=False)
    patch.setattr(smp, "resume_from_checkpoint", resume)


def _evaluate_without_averages(patch: pytest.MonkeyPatch) -> None:
    """An evaluation with averages sees the weights."""
    patch.setattr(smp.AveragedModel, "_exchange", lambda *_: None)


def _load_nothing(patch: pytest.MonkeyPatch) -> None:
    """A state dict does not reach the weights."""
    patch.setattr(smp.DistributedModel, "load_state_dict", lambda *_: None)


def _update_by_element(patch: pytest.MonkeyPatch) -> None:
    """A norm over a parameter is left out."""
    patch.setattr(smp, "DistributedOptimizer", lambda _optimizer: Updating(_optimizer.param_groups[0]["params"]))


@pytest.mark.parametrize(
    ("plant", "script"),
    [
        (_resume_without_optimizer, {"optimizer": "lamb", "resumes": [1, 2]}),
        (_evaluate_without_averages, {"events": [(1, "average"), (2, "averaged")]}),
        (_load_nothing, {"events": [(1, "load", 1)]}),
        (_update_by_element, {"optimizer": "lars"}),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_planted_fault_around_steps_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = dataclasses.replace(draw_program(0)[0], updates=True, steps=3, **script)
    plain, log = run_plain(program)
    with jobs() as on:
        trial = try_program(program, plain, frozenset(log.features), on)
        assert trial.verdict == "exact", trial.why
        plant(monkeypatch)
        assert try_program(program, plain, frozenset(log.features), on).verdict == "wrong"
