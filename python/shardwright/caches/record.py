"""What a rank knows of a cache."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from shardwright.caches.elsewhere import WHERE, Where, put_elsewhere
from shardwright.caches.handles import CacheId, Operation, outline_of
from shardwright.caches.objects import layer_class, layers_of


class Record:
    """What a rank knows of a cache.

    Attributes:
        id: Its id.
        thread: The thread that has first seen it, which is that of a task.
        outlines: What was last seen of each layer.
        versions: How often that has changed.
        told: By rank, the versions that it knows.
        here: Layers that modules on this rank have filled.
        noted: Operations on layers that are elsewhere, in order, with the rank to tell.
        attributes: The attributes that were last seen.
    """

    def __init__(self, id: CacheId, cache: Any, *, is_own: bool) -> None:
        """Know nothing yet of a cache; one that is `is_own` lives as long as code of this rank holds it."""
        self.id = id
        self.thread = threading.get_ident()
        self._cache: Callable[[], Any] = weakref.ref(cache)
        if not is_own:
            self.hold(cache)
        self.outlines: dict[int, dict[str, Any]] = {}
        self.versions: dict[int, int] = {}
        self.told: dict[int, dict[int, int]] = {}
        self.here: set[int] = set()
        self.noted: list[tuple[int, Operation]] = []
        self.attributes: dict[str, Any] = {}

    def found(self) -> Any:
        """Return the cache; None if nobody holds it any more."""
        return self._cache()

    @property
    def cache(self) -> Any:
        """The cache, which somebody holds."""
        cache = self._cache()
        assert cache is not None, "a caller holds it"
        return cache

    def hold(self, cache: Any) -> None:
        """Let the cache live until another rank, where a script has it, needs it no more."""
        self._cache = lambda: cache

    def let_go(self, cache: Any) -> None:
        """Let the cache end with the last object that holds it, which its own layers must not be."""
        self._cache = weakref.ref(cache)

    def note(self, index: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Keep what was done with a layer that is elsewhere, until the next request to the rank that has it."""
        where: Where = vars(self.cache.layers[index])[WHERE]
        self.noted.append((where.rank, Operation(index, name, list(arguments))))

    def refresh(self, indices: Iterable[int] | None = None) -> None:
        """Look at all layers, or at some."""
        layers = layers_of(self.cache)
        for index in range(len(layers)) if indices is None else indices:
            layer = layers[index]
            outline = {name: outline_of(value) for name, value in vars(layer).items() if name != WHERE}
            if outline != self.outlines.get(index):
                self.outlines[index] = outline
                self.versions[index] = self.versions.get(index, 0) + 1

    def put_elsewhere(self, index: int, rank: int, kind: str, outline: dict[str, Any], why: str | None = None) -> None:
        """Let another rank have the contents of a layer, which nobody can use here for the given reason, if any."""
        layers = self.cache.layers
        while len(layers) <= index:  # layers that are made at their first use
            layers.append(object.__new__(layer_class(kind)))
        where = Where(index, rank, self.note)
        where.why = why
        put_elsewhere(layers[index], where, outline)

    def take_operations(self, rank: int) -> list[Operation]:
        """Return, once, what a rank has to do with its layers."""
        due = [operation for to, operation in self.noted if to == rank]
        if due:
            self.noted = [one for one in self.noted if one[0] != rank]
        return due
