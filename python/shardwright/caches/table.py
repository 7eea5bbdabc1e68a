"""The caches of a rank: which layers' contents it has, and what other ranks know of them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch

from shardwright.caches.elsewhere import WHERE, Elsewhere, Where, kind_of, put_elsewhere
from shardwright.caches.handles import CacheChanges, CacheHandle, CacheId, LayerState, outline_of
from shardwright.caches.kinds import is_cache
from shardwright.caches.objects import (
    class_name,
    contents,
    fill,
    layers_of,
    named,
    new_cache,
    plain_attributes,
    tensors_of,
    value_of,
)
from shardwright.caches.record import Record
from shardwright.errors import FrameError

#: Why a cache of a failed step cannot be used.
LOST = (
    "a key/value cache was used in a step that failed or was run again, and what it held on other ranks is gone: "
    "create a new one, and compute it from the tokens again"
)
_BY_VALUE = (
    "a layer of a key/value cache that was given to a module on another rank with gradients enabled is used by a "
    "module that has no such layer (layer_idx): pass use_cache=False"
)


class Received:
    """A cache that a call was given, in its execution."""

    def __init__(self, record: Record, told: Iterable[int]) -> None:
        """Remember how it is before the call, with layers of which the call has told."""
        self.record = record
        record.refresh(told)
        self.before = dict(record.versions)
        self.attributes = record.attributes


class CacheTable:
    """The caches of this rank."""

    def __init__(self, rank: int) -> None:
        """Create a table without caches."""
        self._rank = rank
        self._numbers = itertools.count()
        self._records: dict[CacheId, Record] = {}
        self._by_cache: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()
        #: The layers that modules fill, by the ids of model and module.
        self.layers_of_modules: dict[tuple[int, int], frozenset[int]] = {}
        #: By rank, the caches that it need not keep any more.
        self._released: dict[int, list[CacheId]] = {}

    # --- calls

    def handle(self, cache: Any, to: int, needed: Collection[int], *, returned: bool = False) -> CacheHandle:
        """Return what stands for a cache in a call to another rank, or in the answer to one.

        Args:
            cache: The cache.
            to: The rank.
            needed: The layers that the called module fills, which that rank has from now on.
            returned: Whether it is in an answer, so that the cache lives as long as code on that rank holds it.
        """
        record = self._record_of(cache)
        if returned and record.id[0] == self._rank:
            record.hold(cache)
        record.attributes = self._attributes(cache, to, needed, returned)
        layers = layers_of(cache)
        moved = []
        for index in sorted(needed):
            if index < len(layers) and index not in record.here and not isinstance(layers[index], Elsewhere):
                layer, kind = layers[index], class_name(kind_of(layers[index]))
                moved.append(LayerState(index, kind, contents(layer, detached=True)))
                outline = {name: outline_of(value) for name, value in vars(layer).items()}
                record.put_elsewhere(index, to, kind, outline)
        record.refresh()
        told = record.told.setdefault(to, {})
        with_it = {state.number for state in moved}
        outlines = []
        for index, layer in enumerate(layers):
            if told.get(index) == record.versions[index]:
                continue
            told[index] = record.versions[index]
            has_it = isinstance(layer, Elsewhere) and vars(layer)[WHERE].rank == to
            if index not in with_it and not has_it:
                outlines.append(LayerState(index, class_name(kind_of(layer)), record.outlines[index]))
        operations = record.take_operations(to)
        released = self._released.pop(to, [])
        return CacheHandle(record.id, class_name(type(cache)), record.attributes, outlines, moved, operations, released)

    def by_value(self, cache: Any, needed: Collection[int]) -> CacheHandle:
        """Return what stands for a cache in a call that computes gradients: the layers that it needs, and no others.

        What the call adds to them is on that rank only, and gone after it, so that they are of no use here any more.
        """
        layers = layers_of(cache)
        for index, layer in enumerate(layers):
            if not isinstance(layer, Elsewhere):
                continue
            if (why := vars(layer)[WHERE].why) is None or index in needed:
                raise FrameError(
                    why
                    or "a key/value cache that was filled without gradients is used with gradients enabled, and its "
                    "layers are on several ranks: compute it with gradients enabled too, or use it under "
                    "torch.no_grad()"
                )
        attributes = {name: named(value) for name, value in plain_attributes(cache).items()}
        attributes |= {name: self.by_value(value, needed) for name, value in vars(cache).items() if is_cache(value)}
        moved, outlines = [], []
        for index, layer in enumerate(layers):
            kind = class_name(kind_of(layer))
            if index in needed and not isinstance(layer, Elsewhere):
                moved.append(LayerState(index, kind, contents(layer, detached=False)))
            outlines.append(LayerState(index, kind, {n: outline_of(v) for n, v in vars(layer).items() if n != WHERE}))
        return CacheHandle(None, class_name(type(cache)), attributes, outlines, moved)

    def spend(self, cache: Any, needed: Collection[int], rank: int) -> None:
        """Refuse further uses of the layers of a cache that has crossed by value."""
        for value in vars(cache).values():
            if is_cache(value):
                self.spend(value, needed, rank)
        for index, layer in enumerate(layers_of(cache)):
            if index in needed and not isinstance(layer, Elsewhere):
                why = (
                    f"layer {index} of a key/value cache was given to a module on rank {rank} with gradients enabled, "
                    "and what it has added is there only: use a cache for one forward of a training step, as prefix "
                    "tuning does, and generate under torch.no_grad()"
                )
                outline = {name: outline_of(value) for name, value in vars(layer).items()}
                put_elsewhere(layer, _unusable(index, rank, why), outline)

    def received(self, handle: CacheHandle, sender: int, entered: list[Received], *, returned: bool = False) -> Any:
        """Return the cache that a handle stands for.

        Args:
            handle: The handle.
            sender: The rank that has sent it.
            entered: To this are added the caches whose changes are to be sent back.
            returned: Whether it was in an answer: the cache then lives as long as code of this rank holds it.
        """
        for id in handle.released:
            self._release(id)
        attributes = {
            name: self.received(value, sender, entered, returned=returned)
            if isinstance(value, CacheHandle)
            else value_of(value)
            for name, value in handle.attributes.items()
        }
        record = None if handle.id is None else self._records.get(tuple(handle.id))  # type: ignore[arg-type]
        cache = new_cache(handle) if record is None else record.cache
        vars(cache).update(attributes)
        if record is None:
            record = self._first_seen(handle, cache, is_own=returned)
        self._take(record, handle.outlines, sender, why=None if handle.id is not None else _BY_VALUE)
        for state in handle.moved:
            fill(cache.layers, state)
        for operation in handle.operations:
            getattr(cache.layers[operation.number], operation.name)(*operation.arguments)
        record.attributes = handle.attributes
        if handle.id is not None:
            changed = {one.number for one in (*handle.outlines, *handle.moved)}
            changed.update(one.number for one in handle.operations)
            entered.append(Received(record, changed))
            told = record.told.setdefault(sender, {})
            for state in (*handle.outlines, *handle.moved):
                told[state.number] = record.versions[state.number]
        return cache

    def changes(self, entered: Iterable[Received], to: int) -> list[CacheChanges]:
        """Return what a call has changed of the caches that it was given."""
        changed = []
        for one in entered:
            record = one.record
            record.refresh()
            told = record.told.setdefault(to, {})
            outlines = []
            for index, version in record.versions.items():
                if version == one.before.get(index):
                    continue
                layer = record.cache.layers[index]
                if not isinstance(layer, Elsewhere):
                    if index not in record.here and not getattr(layer, "is_initialized", True):
                        continue  # made on the way to a later one
                    record.here.add(index)
                kind = class_name(kind_of(layer))
                outlines.append(LayerState(index, kind, record.outlines[index]))
                told[index] = version
            now = {name: named(value) for name, value in plain_attributes(record.cache).items()}
            before = {name: value for name, value in one.attributes.items() if not isinstance(value, CacheHandle)}
            changed.append(CacheChanges(record.id, None if now == before else now, outlines))
        return changed

    def take(self, changes: Iterable[CacheChanges], sender: int) -> None:
        """Take over what a call on another rank has changed."""
        for id, attributes, outlines in changes:
            record = self._records.get(id)
            if record is None:
                continue  # of a cache that nobody here has
            if attributes is not None:
                vars(record.cache).update({name: value_of(value) for name, value in attributes.items()})
            self._take(record, outlines, sender)
            record.refresh(state.number for state in outlines)
            told = record.told.setdefault(sender, {})
            for state in outlines:
                told[state.number] = record.versions[state.number]

    def _first_seen(self, handle: CacheHandle, cache: Any, *, is_own: bool) -> Record:
        if handle.id is None:
            return Record((self._rank, -1), cache, is_own=False)
        if handle.id[0] == self._rank:
            raise FrameError(LOST)
        return self._add(Record((handle.id[0], handle.id[1]), cache, is_own=is_own), cache)

    # --- life

    @property
    def ids(self) -> list[CacheId]:
        """The caches that live on this rank, or have layers here."""
        return list(self._records)

    def contents(self) -> list[torch.Tensor]:
        """Return the tensors of all layers that this rank has for caches of other ranks, and of its own."""
        return [
            tensor
            for record in list(self._records.values())
            for layer in layers_of(record.cache)
            if not isinstance(layer, Elsewhere)
            for tensor in tensors_of(vars(layer))
        ]

    def end_step(self) -> list[CacheId]:
        """End a step on the root of a pipeline; return the caches that live, which other ranks are to keep."""
        self._released.clear()
        return self.ids

    def begin_generation(self) -> int:
        """Begin a generation in the calling thread; return what it is ended with."""
        return next(self._numbers)

    def end_generation(self, began: int) -> None:
        """Let go of the caches that the calling thread has created meanwhile, which nothing uses any more."""
        for record in list(self._records.values()):
            is_own = record.id[0] == self._rank and record.id[1] > began
            if is_own and record.thread == threading.get_ident():
                layers_of(record.cache).clear()  # what holds the cache still, such as garbage, holds no contents
                self._release(record.id)

    def keep(self, ids: Iterable[CacheId]) -> None:
        """Forget all caches but these, at the end of a step on another rank than the root."""
        for id in self._records.keys() - {(rank, number) for rank, number in ids}:
            self._release(id)
        self._released.clear()

    def lose(self) -> None:
        """Forget all caches of a step that failed."""
        for record in list(self._records.values()):
            if record.id[0] == self._rank:
                for index, layer in enumerate(layers_of(record.cache)):
                    put_elsewhere(layer, _unusable(index, self._rank, LOST), record.outlines.get(index, {}))
        self._records.clear()
        self._by_cache.clear()
        self._released.clear()

    def _release(self, id: CacheId) -> None:
        record = self._records.pop(id, None)
        if record is None:
            return
        if (cache := record.found()) is not None:
            self._by_cache.pop(cache, None)
            record.let_go(cache)
        for rank in record.told:
            self._released.setdefault(rank, []).append(id)

    def _record_of(self, cache: Any) -> Record:
        record = self._by_cache.get(cache)
        if record is None:
            for layer in layers_of(cache):
                if isinstance(layer, Elsewhere):
                    raise FrameError(vars(layer)[WHERE].why or LOST)
            id = (self._rank, next(self._numbers))
            record = self._add(Record(id, cache, is_own=True), cache)
        return record

    def _add(self, record: Record, cache: Any) -> Record:
        self._records[record.id] = self._by_cache[cache] = record
        weakref.finalize(cache, self._release, record.id).atexit = False
        return record

    def _attributes(self, cache: Any, to: int, needed: Collection[int], returned: bool) -> dict[str, Any]:
        own = {name: named(value) for name, value in plain_attributes(cache).items()}
        inner = {
            name: self.handle(value, to, needed, returned=returned)
            for name, value in vars(cache).items()
            if is_cache(value)
        }
        return {**own, **inner}

    def _take(self, record: Record, outlines: Iterable[LayerState], sender: int, *, why: str | None = None) -> None:
        for index, kind, outline in outlines:
            if index not in record.here:
                record.put_elsewhere(index, sender, kind, outline, why)


def _unusable(index: int, rank: int, why: str) -> Where:
    where = Where(index, rank, lambda *_: None)
    where.why = why
    return where
