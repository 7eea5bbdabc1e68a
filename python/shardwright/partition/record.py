"""The result of tracing a forward, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.execution.placed import KeptState
from shardwright.partition.decision import JoinReason
from shardwright.partition.flows import CrossingFlow, merged
from shardwright.partition.measure import Measurement


@dataclass(frozen=True, kw_only=True)
class ModuleRecord:
    """The trace's observations of one module.

    Attributes:
        execution_index: Its position in the order of first executions; None if it was not executed.
        num_calls: The number of its calls.
        own_seconds: Seconds in its own code, without the modules it calls; None if not measured.
        operations: Floating-point operations in it, including modules it calls, as far as they are counted.
        own_activation_bytes: Bytes it keeps for its backward that no other module kept before: measured, or estimated
            as the bytes of its results.
        input_bytes: Bytes of its arguments.
    """

    execution_index: int | None
    num_calls: int
    own_seconds: float | None
    operations: int
    own_activation_bytes: int
    input_bytes: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The observations of one forward of a model.

    Attributes:
        modules: A record for each module, by path, in ``named_modules()`` order.
        calls: How often one module called another: ``(caller, callee, count)``, by path. Code outside the model
            counts as the root, whose path is empty.
        written_buffers: Names of the buffers that the forward changed.
        attributes: Path and name of each attribute of a module that the forward set, with the paths of the modules
            that set it.
        temporaries: Those `attributes` that were set before anything read them.
        reads: Path and name of each attribute of a module that other modules read, with the paths of those modules.
        flows: State that one execution of a module leaves for another, other than arguments and results.
        measurement: The time of each piece, in order, if measured. `ModuleRecord.own_seconds` are its sums.
    """

    modules: Mapping[str, ModuleRecord]
    calls: tuple[tuple[str, str, int], ...]
    joins: tuple[JoinReason, ...]
    written_buffers: frozenset[str]
    attributes: Mapping[tuple[str, str], tuple[str, ...]]
    temporaries: frozenset[tuple[str, str]]
    reads: Mapping[tuple[str, str], tuple[str, ...]]
    flows: tuple[CrossingFlow, ...]
    kept: tuple[KeptState, ...]
    measurement: Measurement | None

    def together_with(self, other: Trace) -> Trace:
        """Return this trace with the changed and kept state of another forward added. The costs are this trace's."""
        writers = _united(self.attributes, other.attributes)
        # A name that one of the forwards read before setting it is not a temporary in the result.
        set_first = (self.temporaries | (other.attributes.keys() - self.attributes.keys())) & (
            other.temporaries | (self.attributes.keys() - other.attributes.keys())
        )
        pairs = {join.modules for join in self.joins}
        joins = (*self.joins, *(join for join in other.joins if join.modules not in pairs))
        counts = [{path: record.num_calls for path, record in one.modules.items()} for one in (self, other)]
        calls = {path: max(each[path] for each in counts) for path in counts[0]}
        kept = merged(((state.names, state.users) for state in (*self.kept, *other.kept)), calls)
        return dataclasses.replace(
            self,
            joins=tuple(sorted(joins, key=lambda join: join.modules)),
            written_buffers=self.written_buffers | other.written_buffers,
            attributes=writers,
            reads=_united(self.reads, other.reads),
            temporaries=frozenset(set_first),
            flows=tuple(dict.fromkeys((*self.flows, *other.flows))),
            kept=kept,
        )


def _united(
    one: Mapping[tuple[str, str], tuple[str, ...]], other: Mapping[tuple[str, str], tuple[str, ...]]
) -> dict[tuple[str, str], tuple[str, ...]]:
    return {key: tuple(sorted({*one.get(key, ()), *other.get(key, ())})) for key in one.keys() | other.keys()}
