"""Splits the arguments of a step function into microbatches."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from shardwright.caches import is_cache
from shardwright.errors import ConfigError

MicrobatchArguments = tuple[tuple[Any, ...], dict[str, Any]]


class Splitter:
    """Splits the arguments of one step function (the split rule of the spec).

    Every tensor in an argument, directly or nested in lists, tuples, dicts and sets, is narrowed into equal slices
    along axis 0, or along the axis given for the argument. 0-dim tensors and all other values are passed whole. An
    object with a method ``smp_slice(num_mb, mb, axis)`` is split by calling it.
    """

    def __init__(
        self, function: Callable[..., Any], non_split_inputs: Collection[str], input_split_axes: Mapping[str, int]
    ) -> None:
        """Check the names against the function's signature."""
        self._name = getattr(function, "__qualname__", repr(function))
        self._signature = inspect.signature(function)
        self._whole = frozenset(non_split_inputs)
        self._axes = dict(input_split_axes)
        self._names: dict[int, list[str]] = {}
        parameters = self._signature.parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            for option, names in (("non_split_inputs", self._whole), ("input_split_axes", self._axes)):
                for name in names:
                    if name not in parameters:
                        raise ConfigError(
                            f"smp.step: {option} names {name!r}, which is not an argument of {self._name}; "
                            f"its arguments are {', '.join(parameters)}"
                        )

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
    ) -> tuple[list[MicrobatchArguments], list[int] | None]:
        """Return the arguments of each microbatch, and its number of samples if the numbers differ.

        Returns:
            The arguments; and the numbers of samples, or None if they are all equal. With gradients disabled, a batch
            need not divide evenly: the first microbatches then have one sample more.

        Raises:
            ConfigError: A tensor's size along its axis is not divisible by the number of microbatches or, with
                gradients disabled, smaller than it; or tensors to be split have different sizes.
        """
        if num_microbatches == 1 and not _has_slicer((args, kwargs)):
            return [(args, kwargs)], None
        sizes: dict[str, int] = {}
        columns: list[Sequence[Any]] = []
        for name, value in self.named(args, kwargs):
            if name in self._whole or isinstance(value, torch.nn.Module):
                columns.append([value] * num_microbatches)
            else:
                columns.append(self._divide(name, value, self._axes.get(name, 0), num_microbatches, sizes))
        if num_microbatches > 1:
            self._check(sizes, num_microbatches)
        rows = list(zip(*columns, strict=True)) if columns else [()] * num_microbatches
        size = next(iter(sizes.values()), 0)
        counts = _counts(size, num_microbatches) if size % num_microbatches else None
        if not kwargs:
            return [(row, {}) for row in rows], counts
        count = len(args)
        return [(row[:count], dict(zip(kwargs, row[count:], strict=True))) for row in rows], counts

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return the arguments of a call with their names."""
        names = self._names.get(len(args))
        if names is None:
            names = self._names[len(args)] = self._positional_names(len(args))
        return [*zip(names, args, strict=True), *kwargs.items()]

    def _positional_names(self, count: int) -> list[str]:
        """Return the names of ``count`` positional arguments. The last one is repeated for ``*args``."""
        names = list(self._signature.parameters)
        return [names[min(index, len(names) - 1)] if names else f"argument {index}" for index in range(count)]

    def _check(self, sizes: dict[str, int], num_microbatches: int) -> None:
        for path, size in sizes.items():
            if size % num_microbatches and not _divides_unevenly(size, num_microbatches):
                raise ConfigError(
                    f"smp.step: {path} of {self._name} has {size} samples, which {num_microbatches} microbatches do not"
                    " divide evenly; drop the last batch (drop_last=True), change `microbatches`, evaluate under "
                    "torch.no_grad(), where any number from that of microbatches will do, decorate with "
                    "@smp.step(microbatches=1) for batches of any size, or name the argument "
                    "in non_split_inputs to pass it whole"
                )
        if len(sizes) > 1 and len(set(sizes.values())) > 1:
            listed = ", ".join(f"{path} has {size}" for path, size in sizes.items())
            raise ConfigError(
                f"smp.step: tensors to be split into microbatches disagree in size: {listed}; name those that belong"
                " to every microbatch in non_split_inputs, or give the axis of the batch in input_split_axes"
            )

    def _divide(self, path: str, value: Any, axis: int, count: int, sizes: dict[str, int]) -> Sequence[Any]:
        """Return the parts of a value for the microbatches, and record the size of every split tensor."""
        if isinstance(value, torch.Tensor):
            axes = value.dim()
            if axes == 0:
                return [value] * count
            if not -axes <= axis < axes:
                raise ConfigError(
                    f"smp.step: {path} of {self._name} has {axes} axes, so it cannot be split along axis {axis}"
                )
            size = sizes[path] = value.shape[axis]
            if size == 0:  # nothing to divide
                return [value] * count
            if size % count:
                if not _divides_unevenly(size, count):  # raises an error once all sizes are known
                    return [value] * count
                return torch.split(value, _counts(size, count), axis)
            return value.chunk(count, axis)
        if isinstance(value, torch.nn.Module):
            return [value] * count
        if is_cache(value) and count > 1:
            raise ConfigError(
                f"smp.step: {path} of {self._name} is a key/value cache, which {count} microbatches cannot share: "
                "create one in the step function, or decorate it with @smp.step(microbatches=1)"
            )
        if hasattr(value, "smp_slice"):
            return [value.smp_slice(count, microbatch, axis) for microbatch in range(count)]
        if isinstance(value, (dict, UserDict)):
            items = {k: self._divide(f"{path}[{k!r}]", item, axis, count, sizes) for k, item in value.items()}
            return [dict_like(value, {key: pieces[m] for key, pieces in items.items()}) for m in range(count)]
        if isinstance(value, (list, tuple, set, frozenset)):
            listed = [self._divide(f"{path}[{i}]", item, axis, count, sizes) for i, item in enumerate(value)]
            parts = [[pieces[m] for pieces in listed] for m in range(count)]
            named = isinstance(value, tuple) and hasattr(value, "_fields")
            return [type(value)(*part) if named else type(value)(part) for part in parts]
        return [value] * count


def _divides_unevenly(size: int, count: int) -> bool:
    """Return whether this number of samples may be split unevenly: gradients are disabled, so none are averaged."""
    return size >= count and not torch.is_grad_enabled()


def _counts(size: int, count: int) -> list[int]:
    """Return sizes of parts of ``size`` samples that differ by at most one."""
    return [size // count + (part < size % count) for part in range(count)]


def dict_like(original: Any, items: dict[Any, Any]) -> Any:
    """Return a dict of the original's class with other items."""
    if type(original) is dict:
        return items
    copied = original.copy()
    copied.update(items)
    return copied


def _has_slicer(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return False
    if hasattr(value, "smp_slice"):
        return True
    if isinstance(value, (dict, UserDict)):
        return any(_has_slicer(item) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_has_slicer(item) for item in value)
    return False
