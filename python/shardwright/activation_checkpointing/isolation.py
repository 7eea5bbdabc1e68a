"""A second computation with the state of the first, which leaves nothing behind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.activation_checkpointing.children import children_of
from shardwright.contents import (
    INTERNAL,
    attributes_of,
    cells_of,
    put_attributes,
    replaced_in,
    restore_cells,
    restore_dict,
)
from shardwright.errors import FrameError
from shardwright.execution.kept import version_of
from shardwright.frames.remote import has_graph, is_remote
from shardwright.job.runtime import find_runtime
from shardwright.opaque import MAX_BYTES
from shardwright.sharded_data_parallel.parameters import ShardedParameters

#: Batch normalization, which writes to its statistics without incrementing their version counters.
_NORMALISATION = nn.modules.batchnorm._NormBase


#: How much is copied before a first computation to learn whether it changes it.
_LEARNING_BYTES = 1 << 26


class _Thread(threading.local):
    depth = 0

    def __init__(self) -> None:
        #: The states of the first computations in progress, the outermost first.
        self.first: list[State] = []


_thread = _Thread()


def has_entered(state: object, places: Sequence[tuple[nn.Module, str]]) -> None:
    """Record again what modules keep, if a first computation in progress uses it for the first time.

    A module with state waits inside a checkpoint for earlier microbatches, which change the state meanwhile.

    Args:
        state: The state that the microbatch has come to.
        places: Modules, and attributes that hold it.
    """
    for first in _thread.first:
        first.enter(state, places)


def is_isolated() -> bool:
    """Return whether the calling thread is in a second computation that leaves nothing behind."""
    return _thread.depth > 0


class _Known:
    """What is known of a tensor that checkpointed modules keep.

    Attributes:
        changes: Whether it has changed between a first computation and the second; it is then always copied.
        version: The version of the copy.
        copy: A copy, for tensors small enough.
    """

    __slots__ = ("changes", "copy", "version")

    def __init__(self) -> None:
        self.changes = False
        self.version = -1
        self.copy: torch.Tensor | None = None


_known: Any = WeakIdKeyDictionary()


class _Held:
    """A tensor that a module keeps, as it was before the first computation.

    Small ones are copied, and larger ones once it is known that they change. Before the first computation with them,
    which shows it, they are copied as well, unless that takes too much memory.
    """

    __slots__ = ("always", "copy", "is_large", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, *, always: bool, budget: int) -> None:
        self.tensor, self.version, self.copy = tensor, version_of(tensor), None
        known = _known.get(tensor)
        self.always = always or tensor.is_inference() or (known is not None and known.changes)
        self.is_large = isinstance(tensor, nn.Parameter) or self.num_bytes > MAX_BYTES
        if tensor.is_meta or is_remote(tensor) or tensor.layout is not torch.strided:
            self.always = False
            return
        if self.is_large and not self.always and (known is not None or self.num_bytes > budget):
            return
        if known is None:
            known = _known[tensor] = _Known()
        if not self.always and known.copy is not None and known.version == self.version and _equal(tensor, known.copy):
            self.copy = known.copy
            return
        self.copy = tensor.detach().clone()
        if not self.always and not self.is_large:
            known.copy, known.version = self.copy, self.version

    @property
    def num_bytes(self) -> int:
        """The size of the tensor."""
        return self.tensor.numel() * self.tensor.element_size()

    def settle(self) -> None:
        """Note whether the first computation has changed it."""
        if version_of(self.tensor) != self.version:
            _known.setdefault(self.tensor, _Known()).changes = True
        elif self.is_large and not self.always:
            self.copy = None

    def has_changed(self) -> bool:
        """Return whether it may have changed since."""
        if self.always or version_of(self.tensor) != self.version:
            return True
        return self.copy is not None and not _equal(self.tensor, self.copy)

    def before(self) -> torch.Tensor | None:
        """Return a tensor with the values of before the first computation; None if they are lost."""
        if self.copy is None:
            _known.setdefault(self.tensor, _Known()).changes = True
            return None
        own: torch.Tensor = self.copy.clone()
        if isinstance(self.tensor, nn.Parameter):
            return nn.Parameter(own, requires_grad=self.tensor.requires_grad)
        own.requires_grad_(self.tensor.requires_grad)
        return own


def _equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return whether values are equal, of small tensors in host memory; comparing others would wait for the device."""
    return tensor.device.type != "cpu" or tensor.shape != copy.shape or torch.equal(tensor, copy)


class _Record:
    """What a module holds by itself."""

    __slots__ = ("attributes", "gathered", "module", "not_saved", "tables", "training")

    def __init__(self, module: nn.Module, sharded: ShardedParameters | None) -> None:
        self.module, self.training = module, module.training
        own = attributes_of(module)
        self.attributes = {name: value for name, value in own.items() if name not in INTERNAL}
        self.tables = {name: dict(table) for name, table in _tables_of(module).items()}
        self.not_saved = set(module._non_persistent_buffers_set)
        #: Parameters that sharded data parallelism replaces, by shards and by what it gathers, whenever a module runs.
        self.gathered: Set[str] = frozenset() if sharded is None else sharded.names(module)

    def read_again(self, name: str) -> None:
        """Record what the module holds under a name now."""
        if name in INTERNAL:
            return
        own = attributes_of(self.module)
        tables = _tables_of(self.module)
        pairs = [(self.attributes, own), *((recorded, tables[table]) for table, recorded in self.tables.items())]
        for recorded, current in pairs:
            if name in current:
                recorded[name] = current[name]
            else:
                recorded.pop(name, None)

    def own_parameters(self) -> list[nn.Parameter | None]:
        """Return the parameters that stay the module's own."""
        return [one for name, one in self.tables["_parameters"].items() if name not in self.gathered]

    def put(self) -> None:
        own = vars(self.module)
        own["training"] = self.training
        put_attributes(self.module, self.attributes, INTERNAL)
        for name, table in _tables_of(self.module).items():
            before = self.tables[name]
            if name == "_parameters" and self.gathered:
                before = {key: table[key] if key in self.gathered else value for key, value in before.items()}
            restore_dict(table, before)
        if self.module._non_persistent_buffers_set != self.not_saved:
            own["_non_persistent_buffers_set"] = set(self.not_saved)


class State:
    """What modules and other values held before they were computed for the first time."""

    def __init__(self, modules: Sequence[nn.Module], values: Iterable[Any], *, lasting: bool) -> None:
        """Record it.

        Args:
            modules: The modules, each once.
            values: Other values that their code may change.
            lasting: Whether it is kept until the backward; tensors are then copied, and graphs are not kept.
        """
        sharded = _sharded_parameters()
        self._records = [_Record(module, sharded) for module in modules]
        own: list[Any] = [value for record in self._records for value in record.attributes.values()]
        own += [value for record in self._records for value in record.tables["_buffers"].values()]
        self._cells, tensors = cells_of([*own, *values])
        self._held: list[_Held] = []
        self._entered: set[object] = set()
        #: Other tensors in the place of those with a graph, which would be kept alive.
        self._detached: dict[int, Any] = {}
        if not lasting:
            return
        self._hold(tensors, [one for record in self._records for one in record.own_parameters()])
        if self._detached:
            self._detach_containers()
            self._record_detached()

    def _record_detached(self) -> None:
        """Put what stands for values with a graph into the records of modules."""
        for record in self._records:
            record.attributes = _with(record.attributes, self._detached)
            record.tables["_buffers"] = _with(record.tables["_buffers"], self._detached)

    def _statistics(self) -> set[int]:
        """Return the ids of the tensors that modules write to without incrementing their versions."""
        return {id(value) for record in self._records for value in _statistics(record)}

    def _hold(self, tensors: Iterable[torch.Tensor], parameters: Iterable[nn.Parameter | None]) -> None:
        statistics = self._statistics()
        tensors = list(tensors)
        for tensor in tensors:
            if not is_remote(tensor) and has_graph(tensor):
                self._detached[id(tensor)] = tensor.detach().requires_grad_()
        kept = [self._detached.get(id(tensor), tensor) for tensor in tensors]
        kept += list({id(one): one for one in parameters if one is not None}.values())
        budget = _LEARNING_BYTES
        for tensor in kept:
            held = _Held(tensor, always=id(tensor) in statistics, budget=budget)
            budget -= held.num_bytes if held.is_large and held.copy is not None else 0
            self._held.append(held)

    @contextmanager
    def first_computation(self) -> Iterator[None]:
        """Record in the block what modules that wait for earlier microbatches find after their wait."""
        _thread.first.append(self)
        try:
            yield
        finally:
            _thread.first.pop()

    def enter(self, state: object, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Record anew what is at some places, if `state` has not been entered before; see :func:`has_entered`."""
        if state in self._entered:
            return
        self._entered.add(state)
        records = {record.module: record for record in self._records}
        values = []
        for module, name in places:
            if module in records:
                records[module].read_again(name)
                own = _held_by(module)
                values += [own[name]] if name in own else []
        fresh = State((), values, lasting=True)
        again = {id(held.tensor) for held in fresh._held} | {id(cell.value) for cell in fresh._cells}
        statistics = self._statistics()
        for held in fresh._held:
            held.always |= id(held.tensor) in statistics
        self._held = [held for held in self._held if id(held.tensor) not in again] + fresh._held
        self._cells = [cell for cell in self._cells if id(cell.value) not in again] + fresh._cells
        self._detached |= fresh._detached
        if fresh._detached:
            self._record_detached()

    def _detach_containers(self) -> None:
        """Put copies in the place of containers and objects that hold tensors with a graph."""
        remaining, found = self._cells, True
        while found:
            holding = [cell for cell in remaining if any(id(part) in self._detached for part in cell.parts)]
            remaining = [cell for cell in remaining if cell not in holding]
            found = bool(holding)
            for cell in holding:
                cell.before = replaced_in(cell.before, self._detached)
                self._detached[id(cell.value)] = cell.value = copy.copy(cell.value)
        # Contents that lead back to what was copied later.
        for cell in self._cells:
            cell.before = replaced_in(cell.before, self._detached)
            if id(cell.value) in {id(one) for one in self._detached.values()}:
                assert cell.kind.write is not None, "what only leads to others has no cell"
                cell.kind.write(cell.value, cell.before)

    def lasting(self, value: Any) -> Any:
        """Return what stands for a value in the second computation: a copy, if the value holds a graph."""
        return self._detached.get(id(value), value)

    def settle(self) -> None:
        """Note what the first computation has changed."""
        for held in self._held:
            held.settle()

    def put(self) -> None:
        """Let the modules hold it again; tensors that have changed are replaced by others with their earlier values.

        Raises:
            FrameError: A large tensor has changed, and had not been copied because it never did before.
        """
        earlier: dict[int, torch.Tensor] = {}
        for held in self._held:
            if held.has_changed():
                before = held.before()
                if before is None:
                    raise self._lost(held.tensor)
                earlier[id(held.tensor)] = before
        for record in self._records:
            record.put()
        holders = []
        for record in self._records:
            own = vars(record.module)
            holders += [own, own["_buffers"], own["_parameters"]]
        restore_cells(self._cells, holders, earlier)

    def _lost(self, tensor: torch.Tensor) -> FrameError:
        names = [
            f"{name!r} of {type(record.module).__name__}"
            for record in self._records
            for own in (record.tables["_parameters"], record.tables["_buffers"], record.attributes)
            for name, value in own.items()
            if value is tensor
        ]
        what = names[0] if names else "a tensor that a module keeps"
        return FrameError(
            f"{what}, of shape {tuple(tensor.shape)}, was written to after a checkpointed module had computed with it, "
            f"and is too large ({MAX_BYTES >> 10} KiB are the limit) to be copied at every call in case that happens: "
            "the backward cannot compute the module again. From now on it is copied, so that the next step can"
        )


def _tables_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the buffers, parameters and children that a module holds by itself."""
    own = vars(module)
    return {"_buffers": own["_buffers"], "_parameters": own["_parameters"], "_modules": children_of(module)}


def _sharded_parameters() -> ShardedParameters | None:
    runtime = find_runtime()
    return None if runtime is None else runtime.find(ShardedParameters)


def _with(values: dict[str, Any], others: dict[int, Any]) -> dict[str, Any]:
    return {name: others.get(id(value), value) for name, value in values.items()}


def _held_by(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds by itself, by name: buffers, parameters and other attributes."""
    own = attributes_of(module)
    named = {name: value for name, value in own.items() if name not in INTERNAL}
    return {**named, **own["_buffers"], **own["_parameters"]}


def _statistics(record: _Record) -> list[Any]:
    """Return the tensors of a module that it writes to without incrementing their versions."""
    if isinstance(record.module, _NORMALISATION) and record.training:
        return list(record.tables["_buffers"].values())
    return []


@contextmanager
def isolated(state: State) -> Iterator[None]:
    """Compute in the block with an earlier state of modules, which afterwards keep what they kept before."""
    now = State([record.module for record in state._records], [cell.value for cell in state._cells], lasting=False)
    _thread.depth += 1
    try:
        state.put()
        yield
    finally:
        now.put()
        _thread.depth -= 1
