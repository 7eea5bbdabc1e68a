"""Measures how long each module of a forward takes, and in which order, for the simulation of a partition."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.partition.observe import Clock, Execution, Stack, tensors_in

#: A forward is measured at least once, and repeated until these seconds have passed, because short times are noisy.
TARGET_SECONDS = 0.04
MAX_RUNS = 3
#: A forward with fewer operations is measured only on request: calls to another rank cost more than it computes.
MIN_OPERATIONS = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Executed:
    """One execution of a module.

    Attributes:
        path: The module's path; also empty for the code outside the model.
        caller: The index in `Measurement.executions` of its caller; None for the code outside the model.
        argument_bytes: Bytes of the distinct tensors that it was called with.
        result_bytes: Bytes of the distinct tensors that it returned.
    """

    path: str
    caller: int | None
    argument_bytes: int
    result_bytes: int


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A forward as a sequence of pieces. In each piece one module runs, excluding the modules that it calls.

    Attributes:
        executions: In the order of their starts. The first is the code outside the model.
        pieces: Index in `executions` of the running execution, and seconds. Of two consecutive pieces, one belongs to
            an execution and the other to one that it calls, in either order.
    """

    executions: tuple[Executed, ...]
    pieces: tuple[tuple[int, float], ...]

    def own_seconds(self) -> dict[str, float]:
        """Return the seconds in each module without those it calls. Code outside the model counts for the root."""
        totals: dict[str, float] = {}
        for number, seconds in self.pieces:
            path = self.executions[number].path
            totals[path] = totals.get(path, 0.0) + seconds
        return totals

    def seconds(self) -> float:
        """Return the seconds of the whole forward."""
        return sum(seconds for _, seconds in self.pieces)


class Pieces:
    """Observer of one forward that measures its pieces."""

    def __init__(self, clock: Clock, stack: Stack) -> None:
        """Start measuring by `clock`."""
        self._clock = clock
        self._executions = [Executed(path="", caller=None, argument_bytes=0, result_bytes=0)]
        self._numbers = {id(stack.top): 0}
        self._open = [0]
        self._since = self._clock.now()

    def called(self, execution: Execution, caller: Execution, arguments: object) -> None:
        """End the piece of the caller."""
        outer = self._end(caller)
        number = self._numbers[id(execution)] = len(self._executions)
        self._executions.append(
            Executed(path=execution.path, caller=outer, argument_bytes=_nbytes(arguments), result_bytes=0)
        )
        self._open.append(number)
        self._since = self._clock.now()

    def returned(self, execution: Execution, caller: Execution, result: object) -> None:
        """End the piece of the module."""
        number = self._end(execution)
        self._open.pop()
        self._executions[number] = replace(self._executions[number], result_bytes=_nbytes(result))
        self._since = self._clock.now()

    def _end(self, execution: Execution) -> int:
        """End the current piece, and those of modules inside `execution` whose exceptions it caught."""
        number = self._numbers[id(execution)]
        self._clock.add(self._open[-1], self._since)
        while self._open[-1] != number:
            self._open.pop()
            self._clock.add(self._open[-1], self._clock.now())
        return number

    def measurement(self, stack: Stack) -> Measurement:
        """End the last piece and return the measurement."""
        self._end(stack.executions[0])
        return Measurement(executions=tuple(self._executions), pieces=tuple(self._clock.stretches()))


def _nbytes(value: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def repeated(run: Callable[[], Measurement], together: Callable[[bool], bool] = bool) -> Measurement:
    """Measure a forward a few times, if that is fast, and return the shortest time of each piece.

    Other load on the machine can only make a piece slower, never faster. Ranks that must run it equally often agree by
    `together`.
    """
    runs = [run()]
    spent = runs[0].seconds()
    while len(runs) < MAX_RUNS and together(spent + spent / len(runs) <= TARGET_SECONDS):
        runs.append(run())
        spent += runs[-1].seconds()
    last = runs[-1]
    same = [other for other in runs if other.executions == last.executions]
    same = [other for other in same if [number for number, _ in other.pieces] == [n for n, _ in last.pieces]]
    columns = zip(*(other.pieces for other in same), strict=True)
    return Measurement(
        executions=last.executions,
        pieces=tuple((column[0][0], min(seconds for _, seconds in column)) for column in columns),
    )


def evened(measurement: Measurement, kinds: Mapping[str, Hashable]) -> Measurement:
    """Give equivalent pieces, of modules of one kind, their median time, so that equal layers take equally long."""
    executions = measurement.executions
    of: list[Hashable] = []
    seen: dict[int, int] = {}
    for number, _ in measurement.pieces:
        executed = executions[number]
        place = seen[number] = seen.get(number, -1) + 1
        sizes = (executed.argument_bytes, executed.result_bytes)
        of.append((executed.caller is None, kinds[executed.path], sizes, place))
    alike: dict[Hashable, list[float]] = {}
    for kind, (_, seconds) in zip(of, measurement.pieces, strict=True):
        alike.setdefault(kind, []).append(seconds)
    medians = {kind: statistics.median(seconds) for kind, seconds in alike.items()}
    return Measurement(
        executions=executions,
        pieces=tuple((number, medians[kind]) for kind, (number, _) in zip(of, measurement.pieces, strict=True)),
    )


def as_request(
    measurement: Measurement, number: Mapping[str, int], schedule: str, num_microbatches: int, undivided: Sequence[str]
) -> dict[str, object]:
    """Return the measurements for the refinement in the core, as plain data.

    `undivided` are the paths of modules whose division would make microbatches run one after another.
    """
    return {
        "schedule": schedule,
        "num_microbatches": num_microbatches,
        "executions": [
            {
                "module": number[executed.path],
                "caller": executed.caller,
                "argument_bytes": executed.argument_bytes,
                "result_bytes": executed.result_bytes,
            }
            for executed in measurement.executions
        ],
        "pieces": [{"execution": execution, "seconds": seconds} for execution, seconds in measurement.pieces],
        "undivided": [number.get(path, 0) for path in undivided],
    }


@dataclass
class DistinctStorages:
    """A set of distinct storages. Weak references prevent the reuse of their ids."""

    _storages: dict[int, StorageWeakRef] = field(default_factory=dict)

    def keep(self, tensor: torch.Tensor) -> int:
        """Add the storage of a tensor, and return the number of bytes that this adds."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if self._storages.setdefault(reference.cdata, reference) is not reference:
            return 0
        # A view keeps its whole storage alive.
        return storage.nbytes()
