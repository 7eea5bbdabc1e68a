"""The measure: how far what the ranks computed is from what one process computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from shardwright import StepOutput

#: A tensor's error is relative to its own largest element, or to this part of the largest of its kind.
FLOOR = 1e-3


class Comparison:
    """Collects the worst error and what is wrong besides.

    Attributes:
        worst: The largest relative error.
        where: Where it was.
        failures: In words, what else differs.
    """

    def __init__(self) -> None:
        self.worst = 0.0
        self.where = ""
        self.failures: list[str] = []

    def fail(self, text: str) -> None:
        if text not in self.failures:
            self.failures.append(text)

    def gradients(
        self, found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None], where: str
    ) -> None:
        """Compare gradients, or weights, or buffers: each relative to its own size and the largest of all."""
        largest = max((_size(tensor) for tensor in expected.values() if tensor is not None), default=0.0)
        for name, tensor in found.items():
            if name not in expected:
                self.fail(f"{where}: {name} is unknown")
                continue
            reference = expected[name]
            if tensor is None or reference is None:
                if (tensor is None) != (reference is None):
                    missing, present = ("the ranks", "one process") if tensor is None else ("one process", "the ranks")
                    self.fail(f"{where}: {name} is None for {missing}, not for {present}")
                continue
            self.tensor(tensor, reference, FLOOR * largest, f"{where}: {name}")

    def tensor(self, found: torch.Tensor, expected: torch.Tensor, floor: float, where: str) -> None:
        """Compare one tensor."""
        if found.shape != expected.shape or found.dtype != expected.dtype:
            self.fail(f"{where} is {_shape(found)}, expected {_shape(expected)}")
            return
        if not found.numel():
            return
        difference = _size(_widest(found) - _widest(expected))
        scale = max(_size(expected), floor)
        error = difference / scale if scale else (0.0 if difference == 0 else math.inf)
        if not math.isfinite(error):
            error = math.inf
        if error > self.worst:
            self.worst, self.where = error, where

    def value(self, found: Any, expected: Any, where: str) -> None:
        """Compare two structures and the tensors in them."""
        if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
            self.tensor(found, expected, 0.0, where)
        elif type(found) is not type(expected):
            self.fail(f"{where} is {type(found).__name__}, expected {type(expected).__name__}")
        elif isinstance(expected, Mapping):
            if list(found) != list(expected):
                self.fail(f"{where} has keys {list(found)}, expected {list(expected)}")
                return
            for key, item in expected.items():
                self.value(found[key], item, f"{where}[{key!r}]")
        elif isinstance(expected, Sequence) and not isinstance(expected, str):
            if len(found) != len(expected):
                self.fail(f"{where} has {len(found)} items, expected {len(expected)}")
                return
            for index, item in enumerate(expected):
                self.value(found[index], item, f"{where}[{index}]")
        elif is_dataclass(expected) and not isinstance(expected, type):
            for field in fields(expected):
                self.value(getattr(found, field.name), getattr(expected, field.name), f"{where}.{field.name}")
        elif found != expected:
            self.fail(f"{where} is {found!r}, expected {expected!r}")


def at_microbatch(merged: Any, microbatch: int) -> Any:
    """What the step function returned for one microbatch, from the merged result."""
    if isinstance(merged, StepOutput):
        return merged.outputs[microbatch]
    if isinstance(merged, Mapping):
        return {key: at_microbatch(item, microbatch) for key, item in merged.items()}
    if isinstance(merged, tuple) and hasattr(merged, "_fields"):
        return type(merged)(*(at_microbatch(item, microbatch) for item in merged))
    if isinstance(merged, (list, tuple)):
        return type(merged)(at_microbatch(item, microbatch) for item in merged)
    if is_dataclass(merged) and not isinstance(merged, type):
        return type(merged)(**{f.name: at_microbatch(getattr(merged, f.name), microbatch) for f in fields(merged)})
    return merged


def _widest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _size(tensor: torch.Tensor) -> float:
    return float(_widest(tensor).abs().max()) if tensor.numel() else 0.0


def _shape(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
