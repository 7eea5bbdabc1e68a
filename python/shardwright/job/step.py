"""The state of a step on a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Step:
    """The current or last step of a rank. Ranks stay in lockstep because all of them call every step function.

    Attributes:
        num_microbatches: How many microbatches it has.
        number: Its number, counted from 1.
        apart: How many steps only looked, for verifications; the script's own steps do not count them.
        microbatch: The microbatch that a pipeline of one rank runs, or ran last.
        running: Whether it runs.
        committing: Whether its tasks are over and its gradients are being finished.
        voted: Whether other ranks may already know that it has succeeded.
        entered: Whether the execution server has begun it.
    """

    num_microbatches: int
    number: int = 0
    apart: int = 0
    microbatch: int = 0
    running: bool = False
    committing: bool = False
    voted: bool = False
    entered: bool = False

    @property
    def of_training(self) -> int:
        """The number of the script's current or last step, counted from 1; random numbers depend on it."""
        return self.number - self.apart
