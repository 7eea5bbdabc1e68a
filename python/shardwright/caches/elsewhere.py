"""Layers of a cache whose contents are on another rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from shardwright.caches.handles import from_outline
from shardwright.errors import FrameError

#: What code does with the layers of a whole cache. Where the contents are elsewhere, it is done there too.
_OPERATIONS = (
    "reorder_cache",
    "crop",
    "batch_repeat_interleave",
    "batch_select_indices",
    "reset",
    "activate_past_recording",
)
#: What only the module does that runs the layer.
_OF_OWNER = (
    "update",
    "update_conv_state",
    "update_recurrent_state",
    "update_indexer",
    "lazy_initialization",
    "lazy_initialization_indexer",
    "offload",
    "prefetch",
)
#: What holds where the contents are; no attribute of the layer itself.
WHERE = "_shardwright_where"


class Where:
    """Where the contents of a layer are.

    Attributes:
        index: The layer's number.
        rank: The rank to ask for them.
        note: Called with the name and the arguments of an operation on the whole cache.
        why: Why the layer cannot be used at all; None if it can.
    """

    __slots__ = ("index", "note", "rank", "why")

    def __init__(self, index: int, rank: int, note: Callable[[int, str, tuple[Any, ...]], None]) -> None:
        """Create it of a layer that can be used."""
        self.index = index
        self.rank = rank
        self.note = note
        self.why: str | None = None


class Elsewhere:
    """Marks the classes of layers whose contents are on another rank; they know the shapes."""

    __slots__ = ()  # so that a layer can change to such a class and back


def _uncopied(self: Any, protocol: Any) -> NoReturn:
    """Raise an error: a copy would have no contents."""
    where: Where = vars(self)[WHERE]
    raise FrameError(
        f"a key/value cache was copied or pickled, and the contents of its layer {where.index} are on rank "
        f"{where.rank}: compute the cache anew from its tokens, or copy it before the divided model fills it"
    )


def _refused(name: str) -> Callable[..., Any]:
    def refused(self: Any, *_: Any, **__: Any) -> NoReturn:
        where: Where = vars(self)[WHERE]
        raise FrameError(
            where.why
            or f"layer {where.index} of a key/value cache is on rank {where.rank}, whose module fills it, and a module "
            f"of another rank calls its {name}: place modules that share a layer of a cache on one rank with "
            "smp.set_partition, or pass use_cache=False"
        )

    refused.__name__ = name
    return refused


def _noted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        where: Where = vars(self)[WHERE]
        if where.why is not None:
            raise FrameError(where.why)
        where.note(where.index, name, (*args, *kwargs.values()))  # each takes one argument at most
        return own(self, *args, **kwargs)

    return noted


@functools.cache
def elsewhere(kind: type) -> type:
    """Return the class for layers of a class whose contents are on another rank."""
    members: dict[str, Any] = {name: _refused(name) for name in _OF_OWNER if hasattr(kind, name)}
    members |= {name: _noted(name, getattr(kind, name)) for name in _OPERATIONS if hasattr(kind, name)}
    members |= {"_layer_type": None, "__reduce_ex__": _uncopied}  # classes with a type register themselves for it
    return type(f"{kind.__name__}Elsewhere", (kind, Elsewhere), members)


def kind_of(layer: Any) -> type:
    """Return the class of a layer as it is where its contents are."""
    kind = type(layer)
    return kind.__bases__[0] if isinstance(layer, Elsewhere) else kind


def put_elsewhere(layer: Any, where: Where, outline: dict[str, Any]) -> None:
    """Let a layer know of its contents only what is told of them."""
    if not isinstance(layer, Elsewhere):
        kind: Any = type(layer)
        layer.__class__ = elsewhere(kind)
    own = vars(layer)
    own.clear()
    own.update({name: from_outline(value) for name, value in outline.items()})
    own[WHERE] = where
