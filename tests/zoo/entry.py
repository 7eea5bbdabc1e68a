"""One member of the zoo."""

from __future__ import annotations

from dataclasses import dataclass

from tests.parity.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the zoo and what makes it worth having.

    Attributes:
        problem: The models, and how they are trained.
        kind: What sort of model it is: ``"decoder"``, ``"encoder"``, ``"encoder-decoder"``, ``"vision"``,
            ``"speech"``, ``"multimodal"``, ``"state space"``, ``"mixture of experts"``, or ``"module"`` for the
            hand-written ones.
        reason: Why it is hard, in a line.
        depths: The pipeline degrees that it has enough modules for.
        refused: For a model that is refused, a part of the error's text that says what to change.
    """

    problem: Problem
    kind: str
    reason: str
    depths: tuple[int, ...] = (2, 4)
    refused: str | None = None
