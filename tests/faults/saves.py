"""Saves in the background, whose threads are places at which a rank is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.faults.cases import SAVING


def watch(place: Any) -> None:
    """Make what the threads of saves do places."""
    from shardwright.checkpoints.background import BackgroundSave

    tells, completes = BackgroundSave._write_and_tell, BackgroundSave._write_and_complete
    before, after = SAVING

    def telling(save: Any) -> None:
        place.visit_(before)
        tells(save)
        place.visit_(after)

    def completing(save: Any, commit: Callable[[list[str]], object]) -> None:
        def committing(reports: list[str]) -> object:
            place.visit_(after)
            return commit(reports)

        place.visit_(before)
        completes(save, committing)

    BackgroundSave._write_and_tell = telling  # type: ignore[method-assign]
    BackgroundSave._write_and_complete = completing  # type: ignore[method-assign]


def save_twice(folder: str, training: Any) -> None:
    """Save in the background, and wait for the end of it by another save."""
    import shardwright as smp

    for tag, asynchronous in (("a", True), ("b", False)):
        smp.save_checkpoint(folder, tag, model=training.model, optimizer=training.optimizer, asynchronous=asynchronous)


def lock(folder: str) -> None:
    """What another job does that saves into the directory: the lock is free once the save has ended."""
    from shardwright._core import CheckpointWriter

    writer = CheckpointWriter(folder, "other")
    writer.lock(10.0)
    writer.unlock()
