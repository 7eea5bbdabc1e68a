"""Measures the operators of a forward that runs on shapes alone, each on memory that stands in for its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwright.delayed.shapes import ShapeTensor
from shardwright.dispatch_mode import DispatchMode
from shardwright.partition.observe import Clock

#: An operator is measured at least once, and repeated until these seconds have passed, because short times are noisy.
_TARGET_SECONDS = 0.01
_MAX_RUNS = 3


class CountedClock(Clock):
    """A clock that goes on by the seconds of each measured operator."""

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__(torch.device("cpu"))
        self.seconds = 0.0

    def now(self) -> float:
        """Return the seconds of all operators so far."""
        return self.seconds


class StandIns(DispatchMode):  # type: ignore[no-untyped-call]
    """Measures each operator on tensors without values on others that have some, made for it and freed right after it.

    So the weights of one operator are in memory at a time. Operators that are alike in function, shapes, types and
    numbers are measured once. What they take is assumed not to depend on the values, as it is with dense operators.

    Attributes:
        clock: Goes on by the seconds of each operator.
        measured: How many operators were measured.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure on a device."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = CountedClock()
        self.measured = 0
        self._device = device
        self._known: dict[tuple[Any, ...], float] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator on shapes, and measure it if none like it was."""
        kwargs = kwargs or {}
        leaves, structure = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, ShapeTensor) for leaf in leaves):
            return self._run(func, args, kwargs)
        # Before the operator runs, which may change the shape of what it writes to.
        key = (func, structure, *map(_described, leaves))
        result = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and not func.is_view:
            if key not in self._known:
                self._known[key] = self._measure(func, key[2:], leaves, structure)
            self.clock.seconds += self._known[key]
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        clock = Clock(self._device)
        started = clock.now()
        result = func(*args, **kwargs)
        clock.add(0, started)
        self.clock.seconds += clock.stretches()[0][1]
        return result

    def _measure(self, func: Any, described: tuple[Any, ...], leaves: list[Any], structure: Any) -> float:
        given = [self._stand_in(leaf, of) for leaf, of in zip(leaves, described, strict=True)]
        args, kwargs = tree_unflatten(given, structure)
        clock = Clock(self._device)
        spent: list[float] = []
        while len(spent) < _MAX_RUNS and sum(spent) < _TARGET_SECONDS:
            started = clock.now()
            func(*args, **kwargs)
            clock.add(0, started)
            spent = [seconds for _, seconds in clock.stretches()]
        self.measured += 1
        return min(spent)

    def _stand_in(self, leaf: object, described: Any) -> object:
        """Return what an operator gets in the place of an argument."""
        if not isinstance(leaf, ShapeTensor):
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf  # it may be written to
        shape, strides, dtype = described
        last = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
        number = 0 if 0 in shape else 1 + sum(last)
        # Zero is an index that is always allowed; numbers that are none of the special ones are the usual case.
        value = True if dtype == torch.bool else 0.5 if dtype.is_floating_point or dtype.is_complex else 0
        return torch.full((number,), value, dtype=dtype, device=self._device).as_strided(shape, strides)


def _described(leaf: object) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return type(leaf), repr(leaf)
