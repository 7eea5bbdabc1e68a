"""Methods of a ``LightningModule`` that run in steps: once for each microbatch, over the ranks of the model."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils._pytree import tree_map

from shardwright.job.objects import allgather
from shardwright.job.ranks import data_group, group_ranks
from shardwright.lightning.records import Recorder, as_text, from_texts, merged, replay, weighted_mean
from shardwright.model import DistributedModel
from shardwright.state import state
from shardwright.step import StepFunction, StepOutput, step

#: What every microbatch gets as it is.
_WHOLE = (bool, int, float, complex, str, bytes, torch.nn.Module, type(None))

#: Says how much a microbatch counts in a mean.
Weight = Callable[[Any], float | torch.Tensor]


class Stepping:
    """Runs methods of a module in steps.

    Attributes:
        recorder: Keeps what they log.
    """

    def __init__(self, weight: Weight | None, context: Callable[[str], AbstractContextManager[Any]]) -> None:
        """Create it.

        Args:
            weight: Says of a batch how much it counts in a mean; by default its number of samples.
            context: Makes what the method of a name is called in.
        """
        self.recorder = Recorder()
        self._weight = weight
        self._context = context
        self._steps: dict[tuple[str, int], StepFunction[..., Any]] = {}

    def train(self, model: DistributedModel, args: tuple[Any, ...], divisor: int) -> Any:
        """Run forward and backward for a batch of this rank. All ranks call this.

        Args:
            model: The divided module.
            args: The arguments of ``training_step``, the batch first.
            divisor: What losses are divided by before their backward.

        Returns:
            What the method has returned, merged over microbatches.
        """
        samples = samples_in(args[0])
        microbatches = max(count for count in range(1, _most(samples) + 1) if samples % count == 0)
        return self._run(model, "training_step", microbatches, args, divisor)

    def evaluate(self, model: DistributedModel, name: str, args: tuple[Any, ...]) -> Any:
        """Run another method for a batch of this rank, without a backward; see :meth:`train`."""
        return self._run(model, name, _most(samples_in(args[0])), args)

    def _run(self, model: DistributedModel, name: str, microbatches: int, args: tuple[Any, ...], *more: int) -> Any:
        if microbatches > 1:
            _check_divisible(args[0], samples_in(args[0]), "batch")
        if (name, microbatches) not in self._steps:
            self._steps[name, microbatches] = step(microbatches=microbatches)(self._function(name))
        result, (weights, texts) = self._steps[name, microbatches](model, args, *more)
        self._log(model.module, from_texts(texts, microbatches))
        weights = weights if isinstance(weights, list) else [weights] * microbatches
        return tree_map(lambda one: _whole(one, weights), result)

    def _function(self, name: str) -> Callable[..., Any]:
        """Return what runs for each microbatch."""

        def training(model: DistributedModel, args: tuple[Any, ...], divisor: int) -> Any:
            result, told = self._call(model, name, args)
            model.backward(_loss_of(result) / divisor, weight=None if self._weight is None else told[0])
            return result, told

        def evaluation(model: DistributedModel, args: tuple[Any, ...]) -> Any:
            return self._call(model, name, args)

        function = training if name == "training_step" else evaluation
        function.__name__ = function.__qualname__ = name
        return function

    def _call(self, model: DistributedModel, name: str, args: tuple[Any, ...]) -> tuple[Any, tuple[float, str]]:
        samples = samples_in(args[0])
        weight = float(samples if self._weight is None else self._weight(args[0]))
        with self.recorder.of_microbatch(samples, weight) as records, self._context(name):
            result = getattr(model, name)(*args)
        return result, (weight, as_text(records))

    @staticmethod
    def _log(module: Any, records: list[Any]) -> None:
        """Log what the microbatches of all ranks with different samples have logged."""
        group = data_group()
        if len(group_ranks(group)) > 1:
            records = [one for of_rank in allgather(records, group) for one in of_rank]
        replay(module, merged(records))


def samples_in(batch: Any) -> int:
    """Return the size of a batch: that of its tensors along their first axis; 1 if it has none."""
    return next((len(tensor) for tensor in _tensors(batch) if tensor.dim()), 1)


def _most(samples: int) -> int:
    """Return the largest number of microbatches for so many samples."""
    return max(1, min(int(state.cfg.microbatches), samples))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, UserDict)):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors(item)


def _check_divisible(value: Any, samples: int, path: str) -> None:
    """Raise if a batch has what would be given to every microbatch whole, though it is of single samples."""
    if isinstance(value, torch.Tensor) or hasattr(value, "smp_slice"):
        return
    if isinstance(value, (dict, UserDict)):
        for key, item in value.items():
            _check_divisible(item, samples, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple, set, frozenset)):
        if len(value) == samples and not any(True for _ in _tensors(value)):
            _refuse(path, value)
        for index, item in enumerate(value):
            _check_divisible(item, samples, f"{path}[{index}]")
    elif not isinstance(value, _WHOLE):
        _refuse(path, value)


def _refuse(path: str, value: Any) -> None:
    raise MisconfigurationException(
        f"`ShardwrightStrategy` divides batches into microbatches, and {path} is a {type(value).__name__} without "
        "tensors: let `collate_fn` return tensors, in dicts, lists and tuples, or an object with a method "
        "`smp_slice(num_mb, mb, axis)`; or have `microbatches` 1 in the configuration"
    )


def _loss_of(result: Any) -> torch.Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, torch.Tensor):
        raise MisconfigurationException(
            "with `ShardwrightStrategy`, `training_step` must return a Tensor or a dict with the key 'loss', for every "
            f"microbatch; it has returned a {type(result).__name__}"
        )
    return loss


def _whole(value: Any, weights: list[float]) -> Any:
    """Return what microbatches have returned as what one batch has."""
    if not isinstance(value, StepOutput):
        return value
    outputs = value.outputs
    if outputs[0].dim():
        return value.concat()
    return outputs[0] if len(outputs) == 1 else weighted_mean(outputs, weights)
