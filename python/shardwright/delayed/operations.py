"""Recorded operations, and their evaluation."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from shardwright.delayed.memory import Heap

_ATEN = torch.ops.aten
#: In place, without a look at what was there before.
_OVERWRITING = frozenset(
    getattr(_ATEN, name)
    for name in (
        "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_",
        "fill_", "zero_", "copy_",
    )
)  # fmt: skip
_numbers = itertools.count()
heap = Heap()


@dataclass(eq=False)
class DelayedMemory:
    """The memory that delayed tensors share with their views.

    Attributes:
        writes: The operations that changed it, in order.
        first: The value that its making gave.
        real: Its values, once operations are run on it at once; None as long as they are noted.
    """

    writes: list[Operation] = field(default_factory=list)
    first: Value | None = None
    real: torch.Tensor | None = None


@dataclass(eq=False)
class Value:
    """A result of an operation, and the memory that it lies in."""

    memory: DelayedMemory
    operation: Operation


@dataclass(eq=False)
class Operation:
    """A recorded operator with its arguments.

    Attributes:
        function: The operator.
        leaves: The leaves of its positional and named arguments; delayed tensors as a :class:`Value`.
        structure: How the leaves lie in ``(args, kwargs)``.
        generator_state: Of the generator that it draws from, just before; None if it draws nothing.
        device: Of that generator.
        results: What it gives, one for each leaf that is a tensor.
        covers: Whether it writes to all of its first argument without reading it.
        number: Counts operations.
    """

    function: Any
    leaves: list[Any]
    structure: TreeSpec
    generator_state: torch.Tensor | None = None
    device: torch.device | None = None
    results: list[Value] = field(default_factory=list)
    covers: bool = False
    number: int = field(default_factory=lambda: next(_numbers))

    def inputs(self) -> Iterator[Value]:
        """The delayed values among the arguments."""
        return (leaf for leaf in self.leaves if isinstance(leaf, Value))

    def run(self, real: Callable[[Value], torch.Tensor]) -> list[torch.Tensor]:
        """Run the operator on the tensors of its values, with its recorded random number state."""
        leaves = [real(leaf) if isinstance(leaf, Value) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        if self.generator_state is None:
            result = self.function(*args, **kwargs)
        else:
            assert self.device is not None, "given together"
            result = _drawn(self.function, args, kwargs, self.generator_state, self.device)
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def overwrites(function: Any) -> bool:
    """Return whether an operator overwrites its first argument without reading it."""
    return function.overloadpacket in _OVERWRITING


def _drawn(function: Any, args: Any, kwargs: dict[str, Any], state: torch.Tensor, device: torch.device) -> Any:
    if not any(argument.name == "generator" for argument in function._schema.arguments):
        function = getattr(function.overloadpacket, "generator", None) or function
    if any(argument.name == "generator" for argument in function._schema.arguments):
        generator = torch.Generator(device)
        generator.set_state(state)
        return function(*args, **{**kwargs, "generator": generator})
    default = default_generator(device)
    before = default.get_state()
    default.set_state(state)
    try:
        return function(*args, **kwargs)
    finally:
        default.set_state(before)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def evaluate(values: Sequence[Value]) -> list[torch.Tensor]:
    """Compute values of one memory, in the recorded order; views of the memory remain views."""
    memory = values[0].memory
    assert all(value.memory is memory for value in values), "of one memory"
    tensors: dict[Value, torch.Tensor] = {}
    if memory.real is not None:
        assert memory.first is not None, "set when it was made"
        tensors[memory.first] = memory.real
    operations = _needed(values)
    last_use = {value: index for index, each in enumerate(operations) for value in (*each.inputs(), *each.results)}
    done = [value for value in last_use if value not in values]
    expiring: dict[int, list[Value]] = {}
    for value in done:
        expiring.setdefault(last_use[value], []).append(value)
    with _as_when_noted():
        for index, operation in enumerate(operations):
            tensors.update(zip(operation.results, operation.run(tensors.__getitem__), strict=True))
            for value in expiring.get(index, ()):
                tensors.pop(value, None)
    heap.add(list(tensors.values()))
    return [tensors[value] for value in values]


@contextlib.contextmanager
def _as_when_noted() -> Iterator[None]:
    """Disable modes, autocast and inference mode, which may be active where values are read."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
    ):
        yield


def _needed(values: Sequence[Value]) -> list[Operation]:
    """Return the operations that compute values of one memory, in order."""
    found: dict[int, Operation] = {}
    settled = values[0].memory if values[0].memory.real is not None else None
    waiting: list[tuple[Value, float]] = [(value, float("inf")) for value in values]
    seen: set[tuple[int, float]] = set()

    def add(operation: Operation) -> None:
        if operation.number in found:
            return
        found[operation.number] = operation
        own = {id(value.memory) for value in operation.results}
        for index, value in enumerate(operation.inputs()):
            # A view needs what it is a view of, whatever is in there; so does what is written all over.
            no_contents = id(value.memory) in own and operation not in value.memory.writes
            no_contents = no_contents or (operation.covers and index == 0)
            waiting.append((value, -1.0 if no_contents else operation.number))

    while waiting:
        value, before = waiting.pop()
        if value.memory is settled:
            if value is not settled.first:
                add(value.operation)
            continue
        add(value.operation)
        if before < 0 or (id(value.memory), before) in seen:
            continue
        seen.add((id(value.memory), before))
        for write in reversed(value.memory.writes):
            if write.number < before:
                add(write)
                if write.covers:
                    break
    return [found[number] for number in sorted(found)]


def operations_of(values: Iterable[Value]) -> list[Operation]:
    """Return all operations that values depend on, in order."""
    found = {operation.number: operation for value in values for operation in _needed([value])}
    return [found[number] for number in sorted(found)]


def fingerprint(operations: Iterable[Operation]) -> str:
    """Return a fingerprint to compare operations between ranks, without their random numbers."""
    digest = hashlib.sha256()
    for operation in operations:
        digest.update(str(operation.function).encode())
        for leaf in operation.leaves:
            if isinstance(leaf, torch.Tensor):
                digest.update(leaf.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
            elif not isinstance(leaf, (Value, torch.Generator)):
                digest.update(repr(leaf).encode())
    return digest.hexdigest()
