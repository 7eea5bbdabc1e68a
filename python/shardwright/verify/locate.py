"""Finds the first module that departs, from two records and the errors of the parameters' gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwright.verify.fingerprint import Fingerprint, distance
from shardwright.verify.measure import FLOOR
from shardwright.verify.record import CallKey, ModuleRecord, TensorKey
from shardwright.verify.report import Departure


@dataclass
class ValueFlow:
    """Which calls used which tensors, as observed in one process.

    Attributes:
        users: By output or argument, the calls that received this tensor as an argument, in the order of their start.
        parents: By call, the enclosing calls, from the outermost to the innermost.
        drew: By call, the sources of its random numbers: ``"torch"``, ``"random"``, ``"numpy"``.
    """

    users: dict[TensorKey, list[CallKey]] = field(default_factory=dict)
    parents: dict[CallKey, tuple[CallKey, ...]] = field(default_factory=dict)
    drew: dict[CallKey, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """The merged record of the ranks of one replica, and the global rank that recorded each call."""

    record: ModuleRecord
    rank_of: Mapping[CallKey, int]

    @staticmethod
    def of(records: Mapping[int, ModuleRecord]) -> Side:
        """Merge the records of the ranks."""
        whole, rank_of = ModuleRecord(), {}
        for rank, record in records.items():
            whole.calls.update(record.calls)
            whole.gradients.update(record.gradients)
            whole.watched |= record.watched
            whole.dtypes |= record.dtypes
            rank_of.update(dict.fromkeys(record.calls, rank))
        return Side(whole, rank_of)


def comparable_calls(found: ModuleRecord, expected: ModuleRecord) -> list[CallKey]:
    """Return the calls of modules that were called equally often on both sides, in execution order."""
    counts: dict[tuple[str, int], list[int]] = {}
    for side, record in enumerate((found, expected)):
        for path, microbatch, _ in record.calls:
            counts.setdefault((path, microbatch), [0, 0])[side] += 1
    return [key for key in expected.calls if len(set(counts[key[0], key[1]])) == 1]


def first_forward(
    side: Side, expected: ModuleRecord, replica: int, tolerance: float
) -> tuple[Departure, CallKey] | None:
    """Return the first call, in execution order, whose outputs depart; None if there is none."""
    sizes = sorted(f.root_mean_square for outputs in expected.calls.values() for f, _ in outputs)
    floor = FLOOR * sizes[len(sizes) // 2] if sizes else 0.0
    for key in comparable_calls(side.record, expected):
        found, wanted = side.record.calls[key], expected.calls[key]
        if len(found) != len(wanted):
            return _departure(side, replica, key, f"{len(found)} output tensors, not {len(wanted)}", math.inf), key
        for number, ((here, needs), (there, needed)) in enumerate(zip(found, wanted, strict=True)):
            which = "its output" if len(wanted) == 1 else f"its output {number}"
            error = distance(here, there, floor)
            if not error <= tolerance:
                what = f"{which} departs{_other_microbatch(side, expected, key, number, tolerance)}"
                if (here.shape, here.dtype) != (there.shape, there.dtype):
                    what = f"{which} is {here.describe()}, not {there.describe()}"
                return _departure(side, replica, key, what, error), key
            if needed and not needs:
                return _departure(side, replica, key, f"{which} is detached: it needs no gradient", math.inf), key
    return None


def _departure(side: Side, replica: int, key: CallKey, what: str, error: float, phase: str = "forward") -> Departure:
    return Departure(
        module=key[0],
        phase=phase,
        what=what,
        error=error,
        replica=replica,
        microbatch=key[1],
        call=key[2],
        rank=side.rank_of.get(key),
    )


def _other_microbatch(side: Side, expected: ModuleRecord, key: CallKey, number: int, tolerance: float) -> str:
    """Return a note if the output equals that of another microbatch in one process; otherwise an empty text."""
    path, microbatch, call = key
    here = side.record.calls[key][number][0]
    for (other_path, other, other_call), outputs in expected.calls.items():
        same_call = other_path == path and other_call == call and other != microbatch and len(outputs) > number
        if same_call and distance(here, outputs[number][0]) <= tolerance:
            return f" and equals that of microbatch {other}: microbatches are swapped"
    return ""


def first_backward(
    sides: Mapping[int, tuple[Side, ModuleRecord]],
    flow: ValueFlow,
    gradient_errors: Mapping[str, tuple[float, str]],
    names: Iterable[str],
    tolerance: float,
) -> Departure | None:
    """Return the first module, in backward order, whose gradient departs; None if there is none.

    `sides` has, by replica, the records of its ranks and of one process; `gradient_errors`, by parameter, the error of
    its gradient and a description; `names`, the paths of all modules in the model's order.
    """
    modules = _modules_with_bad_parameters(gradient_errors, tolerance)
    if not modules:
        return None
    for replica, (side, expected) in sides.items():
        largest = max((f.root_mean_square for f in expected.gradients.values()), default=0.0)
        for (key, number), wanted in expected.gradients.items():
            error = _gradient_error(side.record, (key, number), wanted, FLOOR * largest)
            if error is not None and not error <= tolerance:
                blamed, what = _blame((key, number), flow, side)
                return _departure(side, replica, blamed, what, error, "backward")
            if key[0] in modules and number >= 0:  # its outputs' gradient agrees, its parameters' does not
                return _parameter_departure(key[0], *modules[key[0]], replica, side.rank_of.get(key))
    path = next((path for path in reversed(list(names)) if path in modules), next(iter(modules)))
    return _parameter_departure(path, *modules[path])


def _parameter_departure(
    path: str, name: str, error: float, detail: str, replica: int = 0, rank: int | None = None
) -> Departure:
    what = f"the gradient of its parameter {name!r} departs{': ' + detail if detail else ''}"
    return Departure(module=path, phase="backward", what=what, error=error, replica=replica, rank=rank)


def _modules_with_bad_parameters(
    errors: Mapping[str, tuple[float, str]], tolerance: float
) -> dict[str, tuple[str, float, str]]:
    """Return, by module, the worst of its own parameters: name, error and detail."""
    found: dict[str, tuple[str, float, str]] = {}
    for name, (error, detail) in errors.items():
        path = name.rpartition(".")[0]
        if not error <= tolerance and (path not in found or not error <= found[path][1]):
            found[path] = (name, error, detail)
    return found


def _gradient_error(found: ModuleRecord, key: TensorKey, wanted: Fingerprint, floor: float) -> float | None:
    """Return the error of a tensor's gradient; None if the ranks could not observe that gradient."""
    if key not in found.watched:
        return None
    here = found.gradients.get(key)
    if here is None:
        return math.inf if wanted.root_mean_square > floor else None
    return distance(here, wanted, floor)


def _blame(key: TensorKey, flow: ValueFlow, side: Side) -> tuple[CallKey, str]:
    """Return the call whose backward produced a wrong gradient: a user of the tensor if known, else its producer."""
    missing = key not in side.record.gradients
    users = flow.users.get(key, [])
    blamed = _around(users, flow)
    if blamed is not None:
        return blamed, f"{'no gradient comes' if missing else 'the gradient departs'} on the way back through it"
    what = f"{'no gradient reaches' if missing else 'the gradient departs that reaches'} its output"
    if users:
        what += f", which {', '.join(sorted({repr(call[0]) for call in users}))} used"
    return key[0], what


def _around(calls: list[CallKey], flow: ValueFlow) -> CallKey | None:
    """Return the innermost call that encloses, or is enclosed by, each of the others; None if there is none."""
    chains = [(*flow.parents.get(call, ()), call) for call in calls]
    longest = max(chains, key=len, default=())
    if longest and all(call in longest for call in calls):
        return longest[-1]
    common = [call for call in longest if call in calls and all(call in chain for chain in chains)]
    return common[-1] if common else None
