"""The state of a step on a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: Beyond all numbers of microbatches, so that no step without gradients begins where a call of one with them does.
_LOOKING = 1 << 32


@dataclass(slots=True)
class Step:
    """The current or last step of a rank. Ranks stay in lockstep because all of them call every step function.

    Attributes:
        num_microbatches: How many microbatches it has.
        number: Its number, counted from 1.
        apart: How many steps the script did not ask for (:meth:`uncounted`).
        training: Whether it computes gradients.
        streams: The numbers from which the seeds of its microbatches are derived.
        trained: How many steps of the script that compute gradients have ended well.
        looked: How many without gradients have ended well since the last of those.
        microbatch: The microbatch that a pipeline of one rank runs, or ran last.
        running: Whether it runs.
        committing: Whether its tasks are over and its gradients are being finished.
        voted: Whether other ranks may already know that it has succeeded.
        entered: Whether the execution server has begun it.
    """

    num_microbatches: int
    number: int = 0
    apart: int = 0
    training: bool = True
    streams: tuple[int, ...] = ()
    trained: int = 0
    looked: int = 0
    microbatch: int = 0
    running: bool = False
    committing: bool = False
    voted: bool = False
    entered: bool = False

    @property
    def of_training(self) -> int:
        """The number of the script's current or last step, counted from 1."""
        return self.number - self.apart

    def begin(self, *, training: bool) -> None:
        """Count a step, which computes gradients if it is one of training.

        Its random numbers depend on which step it is among those that the script asked for: one that fails, or is run
        again, takes none from those that follow, and neither does one without gradients from those with them.
        """
        self.number += 1
        self.training = training
        self.streams = (self.trained + 1, *(() if training else (_LOOKING, self.looked + 1)))

    def end(self) -> None:
        """Count that the step has ended well."""
        if self.training:
            self.trained, self.looked = self.trained + 1, 0
        else:
            self.looked += 1

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Run steps in the block that the script has not asked for: its own are numbered, and draw, as without them."""
        of_training, counts = self.of_training, (self.trained, self.looked)
        try:
            yield
        finally:
            self.apart = self.number - of_training
            self.trained, self.looked = counts
