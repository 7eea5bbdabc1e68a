"""Whose code runs on a rank: of its tasks, one has the turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shardwright.execution.attributes import Attributes

if TYPE_CHECKING:
    from shardwright.execution.task import RunningTask


class Waiting(Protocol):
    """A wait of the task that has the turn."""

    def keep(self) -> None:
        """Another task is about to get the turn."""


class Turn:
    """The turn of one rank.

    Attributes:
        attributes: Attributes of modules that each microbatch has for itself.
        current: The task that has the turn, or had it last.
        waiting: What the current task, if it waits, has to find again once another one has had the turn.
    """

    def __init__(self) -> None:
        """Nobody has it."""
        self.attributes = Attributes()
        self.current: RunningTask | None = None
        self.waiting: Waiting | None = None

    def take(self, task: RunningTask) -> None:
        """A task has the turn: its microbatch finds in modules what it left there."""
        self._leave_wait()
        self.current = task
        self.attributes.enter(task.microbatch)

    def end_step(self) -> None:
        """Nobody has it any more."""
        self._leave_wait()
        self.current = None
        self.attributes.end_step()

    def _leave_wait(self) -> None:
        """The current task's wait, if it is in one, goes on while the process is another's."""
        if self.waiting is not None:
            self.waiting.keep()
            self.waiting = None
