"""The results of a step function: one value per microbatch, merged."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from shardwright.errors import ShardwrightError
from shardwright.step.deferred import DeferredTensor
from shardwright.values import registry
from shardwright.values.arrays import is_array
from shardwright.values.state import dict_functions


def _operator(name: str) -> Callable[..., Any]:
    """Return a special method that is forwarded to the only microbatch's tensor."""

    def method(self: StepOutput, *arguments: Any) -> Any:
        return getattr(self._only(name), name)(*arguments)

    method.__name__ = name
    method.__doc__ = "As a tensor's, where there is one microbatch."
    return method


class StepOutput:
    """One returned tensor of a step function, for every microbatch.

    It can be used on every rank of the pipeline. A large tensor is fetched from the root when it is first used.

    With one microbatch, the object can be used like the tensor itself. With several, a tensor operation would be
    ambiguous: a mean, a sum or all of them could be meant (a loss, a number of hits, a batch of logits). Tensor
    operations then raise an error, which describes what to write instead.
    """

    __slots__ = ("_outputs", "_weights")

    def __init__(
        self, outputs: Sequence[torch.Tensor | DeferredTensor], weights: Sequence[float] | None = None
    ) -> None:
        """Store the microbatches' tensors, and their weights in the mean. None weights all equally."""
        self._outputs = list(outputs)
        self._weights = weights

    def _only(self, what: str) -> torch.Tensor:
        """Return the tensor of the only microbatch; raise if there are several."""
        if len(self._outputs) > 1:
            raise ShardwrightError(_several(what, len(self._outputs)))
        return self.outputs[0]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of a tensor that this class does not have."""
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"a StepOutput has no attribute {name!r}; its tensors are in .outputs")
        if name == "backward":
            raise AttributeError(
                "StepOutput.backward: the step's backward is over; call model.backward(loss) in the step function"
            )
        if len(self._outputs) > 1:
            raise AttributeError(_several(name, len(self._outputs)))
        return getattr(self.outputs[0], name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a PyTorch function with the tensors of the only microbatch in place of step outputs."""
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map(
            lambda item: item._only(name) if isinstance(item, StepOutput) else item, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __format__(self, specification: str) -> str:
        """Return the text of ``repr`` or, with a format specification, the only tensor formatted with it."""
        return format(self._only(f"format {specification!r}"), specification) if specification else str(self)

    def __eq__(self, other: object) -> Any:
        """Compare by identity with other step outputs, and like the only tensor with numbers and tensors."""
        if isinstance(other, (numbers.Number, torch.Tensor)):
            return self._only("__eq__") == other
        return NotImplemented

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """Return a text with the number of microbatches."""
        return f"StepOutput({len(self._outputs)} microbatches)"

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The tensors, in the order of microbatches.

        Raises:
            PeerLostError: A large tensor was not fetched before the root left.
        """
        fetched = [output.fetch() if isinstance(output, DeferredTensor) else output for output in self._outputs]
        self._outputs = list(fetched)
        return fetched

    def detach(self) -> StepOutput:
        """Return the same output, with tensors that are detached from the graph of their microbatch."""
        return StepOutput([output.detach() for output in self.outputs], self._weights)

    def reduce_mean(self) -> torch.Tensor:
        """Return the mean over microbatches, with the shape and dtype of one microbatch.

        If ``model.backward`` received weights, the mean is weighted by them; a microbatch of weight 0 does not count,
        whatever its value. If the batch of an evaluation does not divide evenly, each microbatch is weighted by its
        number of samples.
        """
        if self._weights is None:
            return self.reduce_sum() / len(self.outputs)
        self._check_shapes("summed")
        total = math.fsum(self._weights)
        pairs = zip(self.outputs, self._weights, strict=True)
        terms = [output * (weight / total) for output, weight in pairs if weight]
        return sum(terms[1:], start=terms[0]) if terms else torch.full_like(self.outputs[0], math.nan)

    def reduce_sum(self) -> torch.Tensor:
        """Return the sum over microbatches, with the shape and dtype of one microbatch."""
        self._check_shapes("summed")
        first, *others = self.outputs
        return sum(others, start=first)

    def concat(self) -> torch.Tensor:
        """Return the microbatches concatenated along axis 0. 0-dim tensors are stacked."""
        outputs = self.outputs
        return torch.stack(outputs) if outputs[0].dim() == 0 else torch.cat(outputs, dim=0)

    def stack(self) -> torch.Tensor:
        """Return the microbatches stacked along a new axis 0."""
        self._check_shapes("stacked")
        return torch.stack(self.outputs)

    def _check_shapes(self, verb: str) -> None:
        shapes = [tuple(output.shape) for output in self.outputs]
        if len(set(shapes)) > 1:
            raise ShardwrightError(
                f"outputs of different shapes by microbatch cannot be {verb}: {shapes}; use .outputs or .concat()"
            )


def _several(what: str, microbatches: int) -> str:
    return (
        f"a StepOutput holds the tensors of {microbatches} microbatches, for which {what} has no single meaning: write "
        ".reduce_mean() for their mean (a loss), .reduce_sum() for their sum (a number of hits), .concat() for the "
        "whole batch, or .outputs for the list of them"
    )


_UNARY = ("abs", "array", "bool", "complex", "float", "index", "int", "invert", "iter", "len", "neg", "pos")
_COMPARED = ("contains", "ge", "getitem", "gt", "le", "lt")
_BINARY = ("add", "and", "floordiv", "matmul", "mod", "mul", "or", "pow", "sub", "truediv", "xor")
for _name in (*_UNARY, *_COMPARED, *_BINARY, *(f"r{each}" for each in _BINARY)):
    if hasattr(torch.Tensor, f"__{_name}__"):
        setattr(StepOutput, f"__{_name}__", _operator(f"__{_name}__"))


def merge_microbatches(results: list[Any], weights: Sequence[float] | None = None) -> Any:
    """Merge the results of the microbatches into one structure, with a :class:`StepOutput` for every tensor.

    Values other than tensors are returned unchanged if all microbatches agree, otherwise as the list of the
    microbatches' values.
    """
    first = results[0]
    if all(isinstance(result, (torch.Tensor, DeferredTensor)) for result in results):
        return StepOutput(results, weights)
    same_type = all(type(result) is type(first) for result in results)
    if same_type and isinstance(first, dict) and all(result.keys() == first.keys() for result in results):
        merged = {key: merge_microbatches([result[key] for result in results], weights) for key in first}
        return _like(first, merged)
    if same_type and isinstance(first, (list, tuple)) and all(len(result) == len(first) for result in results):
        items = [merge_microbatches([result[index] for result in results], weights) for index in range(len(first))]
        return _sequence_like(first, items)
    if same_type and is_dataclass(first) and not isinstance(first, type):
        names = [f.name for f in fields(first) if all(hasattr(result, f.name) for result in results)]
        values = {name: merge_microbatches([getattr(result, name) for result in results], weights) for name in names}
        return _with(first, values)
    return first if same_type and all(_equal(result, first) for result in results) else results


def _like(original: dict[Any, Any], items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    if is_dataclass(original):  # transformers' ModelOutput
        return type(original)(**items)
    flatten, unflatten = dict_functions(type(original))
    return unflatten({**flatten(original), "items": items})


def _sequence_like(original: Any, items: list[Any]) -> Any:
    """Return a list or tuple of the original's class with other items. A named tuple's own code does not run."""
    return original._make(items) if hasattr(original, "_make") else type(original)(items)


def _with(original: Any, values: dict[str, Any]) -> Any:
    """Return a copy of a dataclass object with other values, without a call of its ``__init__``."""
    copied = copy.copy(original)
    for name, value in values.items():
        object.__setattr__(copied, name, value)
    return copied


def _equal(left: Any, right: Any) -> bool:
    try:
        same = left == right
        return bool(left.shape == right.shape and same.all()) if is_array(left) and is_array(right) else bool(same)
    except (RuntimeError, ValueError):
        return False


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any], *, in_registered: bool = False) -> Any:
    """Return the value with every tensor in its dicts, lists, tuples and dataclasses replaced.

    With ``in_registered``, tensors in objects of registered types are replaced too, which :func:`merge_microbatches`
    leaves unchanged.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    inner = partial(map_tensors, function=function, in_registered=in_registered)
    if isinstance(value, dict):
        return _like(value, {key: inner(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [inner(item) for item in value]
        return _sequence_like(value, items)
    if is_dataclass(value) and not isinstance(value, type):
        return _with(value, {f.name: inner(getattr(value, f.name)) for f in fields(value) if hasattr(value, f.name)})
    entry = registry.encoders.get(type(value)) if in_registered else None
    if entry is not None:
        name, flatten = entry
        return registry.decoders[name](inner(flatten(value)))
    return value
