"""A divided model for code that knows nothing of steps, as that of predictions: every call is a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map
from transformers.trainer_pt_utils import find_batch_size

from shardwright.accelerate.gathering import gathered_objects
from shardwright.generation import generate
from shardwright.huggingface.rows import by_rows
from shardwright.huggingface.shares import times
from shardwright.model import DistributedModel
from shardwright.step import StepFunction, StepOutput, step

if TYPE_CHECKING:
    from shardwright.huggingface.weighing import Weighing


class ModelInSteps:
    """Calls a model, and its ``generate``, in steps without a backward; other attributes are the model's.

    The outputs are those of the whole batch, on all ranks of the pipeline. Microbatches' losses count for their labels,
    as in :mod:`shardwright.huggingface.shares`.
    """

    def __init__(
        self,
        model: DistributedModel,
        weighing: Weighing,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Create it.

        Args:
            model: The model.
            weighing: What losses of microbatches count for.
            context: What the model is called in.
        """
        self._model = model
        self._steps: dict[int, StepFunction[..., Any]] = {}

        def forward(model: DistributedModel, count: int, inputs: dict[str, Any], of_batch: float) -> tuple[Any, float]:
            counted, inputs = weighing.count(inputs), dict(inputs)
            number = inputs.get("num_items_in_batch")
            if number is not None and counted and not weighing.is_sum:
                inputs = {**inputs, "num_items_in_batch": times(number, counted / of_batch, torch.float64)}
            args = [inputs.pop(str(index)) for index in range(count)]
            with context():
                return tree_map(_as_float32, model(*args, **inputs)), counted

        self._weighing = weighing
        self._context = context
        self._forward = forward

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run the model on a batch."""
        batch = {**{str(index): value for index, value in enumerate(args)}, **inputs}
        microbatches = self._weighing.microbatches_of(batch)
        if microbatches not in self._steps:
            self._steps[microbatches] = step(microbatches=microbatches)(self._forward)
        outputs, counts = self._steps[microbatches](
            self._model, len(args), by_rows(batch, samples_in(batch)), self._weighing.count(batch)
        )
        counts = counts if isinstance(counts, list) else [counts] * microbatches
        return tree_map(lambda one: _merged(one, counts, self._weighing.is_sum), outputs)

    @property
    def divided_model(self) -> DistributedModel:
        """The model that is called."""
        return self._model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate for a batch."""
        return generate(self._model, args, kwargs, within=self._context)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model."""
        return getattr(self._model, name)


def samples_in(inputs: Mapping[str, Any]) -> int:
    """Return the size of a batch, at least 1."""
    return max(1, find_batch_size(inputs) or 1)  # type: ignore[no-untyped-call]


def _as_float32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


def _merged(value: Any, counts: list[float], is_sum: bool) -> Any:
    if not isinstance(value, StepOutput):
        return value
    outputs = value.outputs
    if outputs[0].dim():
        return value.concat()
    if is_sum:
        return value.reduce_sum()
    total = sum(counts)
    counted = [(one, number) for one, number in zip(outputs, counts, strict=True) if number]
    # A part without labels has no mean of its own.
    return sum(one * (number / total) for one, number in counted) if total else value.reduce_mean()


def over_replicas(loss: torch.Tensor, count: float, is_sum: bool) -> torch.Tensor:
    """Return the mean of the losses of all replicas, each of which counts for so much; or their sum."""
    told = [(one.to(loss.device), number) for one, number in gathered_objects((loss.detach(), count)) if number]
    total = 1 if is_sum else sum(number for _, number in told)
    return sum((one * (number / total) for one, number in told), start=torch.zeros_like(loss)) if told else loss
