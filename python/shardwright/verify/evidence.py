"""The evidence of the verified step that each rank keeps, and how rank 0 requests it."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardwright.errors import ConfigError, ShardwrightError
from shardwright.job.objects import receive_on, send_on
from shardwright.job.runtime import Runtime
from shardwright.step.split import dict_like
from shardwright.verify.measure import plain
from shardwright.verify.record import ModuleRecord
from shardwright.verify.report import Report

_QUESTIONS = "verification"
_ANSWERS = "verification answers"
#: Placeholder for an argument that cannot be sent. Rank 0 uses its own.
LOCAL = "<local>"


class Overview(NamedTuple):
    """The first evidence that a rank sends: parts of its :class:`Evidence`, names in place of buffers."""

    record: ModuleRecord
    groups: list[list[str]]
    start_buffers: list[str]
    buffers: list[str]
    hooked: list[str]
    requests: tuple[int, int]


@dataclass
class Evidence:
    """The evidence of one rank.

    Attributes:
        record: Its module calls.
        start_parameters: The values of its parameters at the start of the step, by full name.
        start_buffers: The values of its buffers at the start of the step, by full name.
        gradients: The gradients from the step, by full name.
        buffers: The values of its buffers after the step, by full name.
        groups: Full names of its parameters. The names of one tensor form a group.
        hooked: Full names of the parameters with gradient hooks of the user.
        requests: Forward and backward requests that this rank sent.
        results: On a root, by microbatch, the leaves of the step function's result.
        losses: On a root, by microbatch, the tensors given to ``model.backward``.
        inputs: On a root, the leaves of the step function's arguments.
        random: On a root, the seed and the states of the generators of the CPU and of its device when the step began.
    """

    record: ModuleRecord = field(default_factory=ModuleRecord)
    start_parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    start_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    hooked: list[str] = field(default_factory=list)
    requests: tuple[int, int] = (0, 0)
    results: dict[int, list[tuple[str, Any]]] = field(default_factory=dict)
    losses: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    inputs: list[tuple[str, Any]] = field(default_factory=list)
    random: tuple[str, torch.Tensor | None, dict[int, torch.Tensor]] = ("0", None, {})

    def answer(self, what: str, which: Any) -> Any:
        """Return the requested piece of evidence."""
        if what == "overview":
            start_buffers, buffers = list(self.start_buffers), list(self.buffers)
            return Overview(self.record, self.groups, start_buffers, buffers, self.hooked, self.requests)
        if what == "losses":
            return self.losses.get(which, [])
        if what in ("inputs", "random"):
            return getattr(self, what)
        return getattr(self, what).get(which)


def serve(runtime: Runtime, evidence: Evidence) -> Report:
    """Serve the evidence of a rank until the report arrives; raise if rank 0 could not make it."""
    while True:
        what, which = receive_on(runtime, 0, _QUESTIONS)
        if what == "report":
            report: Report = which
            return report
        if what == "failed":
            raise ShardwrightError(f"smp.verify failed on rank 0: {which}")
        send_on(runtime, 0, _ANSWERS, evidence.answer(what, which))


class EvidenceReader:
    """Reads the evidence of all ranks, on rank 0."""

    def __init__(self, runtime: Runtime, own: Evidence) -> None:
        """Create a reader for the ranks of a runtime."""
        self._runtime = runtime
        self._own = own

    def read(self, rank: int, what: str, which: Any = None) -> Any:
        """Return one piece of a rank's evidence. See :class:`Evidence`."""
        if rank == self._runtime.place.rank:
            return self._own.answer(what, which)
        send_on(self._runtime, rank, _QUESTIONS, (what, which))
        return receive_on(self._runtime, rank, _ANSWERS)

    def finish(self, what: str, outcome: Report | str) -> None:
        """End the service of the other ranks, with a report or a failure."""
        for rank in range(self._runtime.place.launch.world_size):
            if rank != self._runtime.place.rank:
                send_on(self._runtime, rank, _QUESTIONS, (what, outcome))


def inputs_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the leaves of a step function's arguments, in a form that can be sent."""
    found: list[tuple[str, Any]] = []

    def sent(path: str, leaf: Any) -> Any:
        if hasattr(leaf, "smp_slice") or isinstance(leaf, (set, frozenset)):
            raise ConfigError(
                f"smp.verify cannot send {path}, a {type(leaf).__qualname__}, of this rank to rank 0, which has to run "
                "every replica's batch: pass tensors in lists, tuples, dicts or dataclasses"
            )
        value = plain(leaf)
        found.append((path, value if isinstance(leaf, torch.Tensor) or value is leaf else LOCAL))
        return leaf

    _mapped((args, dict(kwargs)), sent, "arguments")
    return found


def with_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: list[tuple[str, Any]], rank: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return rank 0's arguments with the leaves of another root's; raise if those have another structure."""
    rest: Iterator[tuple[str, Any]] = iter(inputs)

    def received(path: str, leaf: Any) -> Any:
        there, value = next(rest, ("nothing", None))
        if there != path:
            raise ConfigError(
                f"rank {rank} gave the step function other arguments than rank 0: {there} where rank 0 has {path}; "
                "smp.verify needs the same structure on all replicas"
            )
        return leaf if isinstance(value, str) and value == LOCAL else value

    mapped_args, mapped_kwargs = _mapped((args, dict(kwargs)), received, "arguments")
    return mapped_args, mapped_kwargs


def _mapped(value: Any, function: Callable[[str, Any], Any], path: str) -> Any:
    if isinstance(value, (dict, UserDict)):
        items = {key: _mapped(item, function, f"{path}[{key!r}]") for key, item in value.items()}
        return dict_like(value, items)
    if isinstance(value, (list, tuple)):
        parts = [_mapped(item, function, f"{path}[{index}]") for index, item in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _mapped(getattr(value, f.name), function, f"{path}.{f.name}") for f in _fields(value)}
        return dataclasses.replace(value, **changed)
    return function(path, value)


def _fields(value: Any) -> list[dataclasses.Field[Any]]:
    return [one for one in dataclasses.fields(value) if one.init]
