"""Whether the losses of two microbatches make the loss of both: asked once, of the first batch that can tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.accelerate.gathering import gathered_objects
from shardwright.checkpoints import random_state
from shardwright.errors import RemoteError
from shardwright.huggingface.plain import kept
from shardwright.job.runtime import current_runtime
from shardwright.model import DistributedModel

#: How much of an error is told, in characters.
_MOST_WORDS = 300


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
        weights: What the losses of microbatches are to be weighed by; None if nothing makes them that of both.
        together: The loss of both.
        made: What their losses make.
        bound: The largest difference that is rounding.
    """

    weights: str | None
    together: float
    made: float
    bound: float

    def warning(self) -> str:
        """What to say of it."""
        away = abs(self.made - self.together) / max(abs(self.together), 1e-300)
        return (
            f"Trainer: the loss of two microbatches together is {self.together:.6g}, and their losses make "
            f"{self.made:.6g}, {away:.2g} of it apart, where rounding is up to {self.bound:.2g}: the loss of a row "
            "depends on the other rows of its microbatch, as with pairs of rows, negatives from the batch, weights of "
            "classes or the balance of a router. So each batch runs in one microbatch, as exact as in one process, in "
            "which the ranks of a pipeline take turns. What lets them run at once: row_blocks = 2 on the class of the "
            "trainer if a batch has chosen rows first and rejected ones after them; or a sum divided by "
            "num_items_in_batch"
        )


@dataclass(frozen=True)
class Unanswered:
    """That nothing was found.

    Attributes:
        reason: Why, in words.
    """

    reason: str

    def warning(self) -> str:
        """What to say of it."""
        return (
            f"Trainer: whether the losses of two microbatches make the loss of both could not be asked: {self.reason}. "
            "If the loss of a row depends on other rows of its microbatch, the training differs from that in one "
            "process; losses under torch.no_grad() in evaluation mode, for one and for two microbatches, would tell"
        )


def ask(
    losses: Callable[[str, int], list[float]],
    weights: Mapping[str, Sequence[float]],
    model: DistributedModel,
    dtypes: set[torch.dtype],
) -> Answer | Unanswered:
    """Ask whether the losses of two microbatches make that of both. All ranks call this.

    Args:
        losses: Computes the losses of the rows of both, in so many microbatches, which are told their share by these
            weights.
        weights: By what the loss of each microbatch may be multiplied, by name; the first that fits is taken.
        model: The model.
        dtypes: What it computes in.

    Returns:
        The answer, the same on all ranks; why there is none, if a loss could not be computed or is no finite number.
    """
    bound, first = _rounding(model, dtypes), None
    for name, own in weights.items():
        found = _found(losses, name, model)
        every = gathered_objects((found, list(own)))
        reasons = [one for one, _ in every if isinstance(one, str)]
        if reasons:  # the error itself, rather than what other ranks heard of it
            return Unanswered(min(reasons, key=lambda reason: reason.startswith(RemoteError.__name__)))
        made = [sum(loss * weight for loss, weight in zip(one[1:], each, strict=True)) for one, each in every]
        away = [abs(one - whole) / max(1.0, abs(whole)) for one, ((whole, *_), _) in zip(made, every, strict=True)]
        worst = max(range(len(away)), key=lambda index: away[index])
        answer = Answer(name if away[worst] <= bound else None, every[worst][0][0], made[worst], bound)
        if answer.weights is not None:
            return answer
        first = first or answer
    assert first is not None, "there are weights to ask with"
    return first


def _found(losses: Callable[[str, int], list[float]], name: str, model: DistributedModel) -> list[float] | str:
    """Return the loss of both, and that of each; or why there is none."""
    with _untouched(model), torch.no_grad():
        try:
            each = losses(name, 2)  # first, since a model is divided by what it sees in a microbatch
            found = [*losses(name, 1), *each]
        except Exception as error:  # a loss that is not made for evaluation; other replicas have to hear of it
            return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MOST_WORDS]
    return found if all(map(math.isfinite, found)) else f"the losses are {', '.join(map(str, found))}"


def _rounding(model: DistributedModel, dtypes: set[torch.dtype]) -> float:
    """Return how far rounding moves a loss, relatively, when a batch is computed in parts.

    Errors of so many roundings in a row, one for each module, are within four times the square root of their number,
    in units of rounding, with high probability (Higham and Mary, A New Approach to Probabilistic Rounding Error
    Analysis, 2019).
    """
    # Libraries compute losses in float32 even if the model is of float64.
    unit = max(torch.finfo(dtype).eps for dtype in {*dtypes, torch.float32}) / 2
    return 4 * math.sqrt(sum(1 for _ in model.module.modules())) * unit


@contextmanager
def _untouched(model: DistributedModel) -> Iterator[None]:
    """Run a block in evaluation mode, and put back modes, buffers and random number streams."""
    streams = random_state.streams()
    modes = [(one, one.training) for one in model.modules()]
    buffers = [(one, one.clone()) for one in model.local_buffers() if not one.is_meta]
    model.eval()
    try:
        with current_runtime().step.uncounted():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        random_state.restore(streams)


@contextmanager
def uncounted(trainer: Any) -> Iterator[None]:
    """Run a block, and put back what a trainer counts in plain values."""
    put_back = kept(trainer)
    try:
        yield
    finally:
        put_back()
