"""The turn: of the tasks on a rank, only the one that has the turn runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shardwright.execution.attributes import Attributes

if TYPE_CHECKING:
    from shardwright.execution.task import Phase, RunningTask


class Waiting(Protocol):
    """A wait of the task that has the turn."""

    def keep(self) -> None:
        """Save the task's state, because another task is about to get the turn."""


class TurnObserver(Protocol):
    """Sees the tasks of a step begin, for as long as it is one of the turn's observers."""

    def begins(self, phase: Phase, microbatch: int) -> None:
        """See a task of a microbatch begin, or the backward of one whose task goes on."""

    def placed(self) -> None:
        """See that a model has just been divided, and what other ranks own released."""


class Turn:
    """The turn of one rank.

    Attributes:
        attributes: The module attributes of which each microbatch has its own values.
        current: The task that has the turn, or had it last.
        waiting: The wait of the current task, which saves state before another task gets the turn; None if there is
            none.
        observers: See tasks begin.
    """

    def __init__(self) -> None:
        """Create a turn that no task has."""
        self.attributes = Attributes()
        self.current: RunningTask | None = None
        self.waiting: Waiting | None = None
        self.observers: list[TurnObserver] = []

    def take(self, task: RunningTask) -> None:
        """Give the turn to a task, and restore its microbatch's attributes of modules."""
        self._leave_wait()
        self.current = task
        self.attributes.enter(task.microbatch)
        self.begins(task.phase, task.microbatch)

    def begins(self, phase: Phase, microbatch: int) -> None:
        """Tell observers that a task of a microbatch begins, or its backward."""
        for observer in self.observers:
            observer.begins(phase, microbatch)

    def end_step(self) -> None:
        """Take the turn from the current task at the end of a step."""
        self._leave_wait()
        self.current = None
        self.attributes.end_step()

    def _leave_wait(self) -> None:
        """If the current task is waiting, save its state before another task runs."""
        if self.waiting is not None:
            self.waiting.keep()
            self.waiting = None
