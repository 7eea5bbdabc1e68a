"""Key/value caches of ``transformers`` whose layers are on the ranks that run them.

A cache that is an argument of a call to another rank crosses as a :class:`CacheHandle`. The other rank has an object of
the same class with the same number of layers. The contents of a layer are on the rank that runs the attention that
writes to it, and never cross. In its place, other ranks have a layer that knows only the shapes, so that it answers
questions about lengths and masks, and that carries what is done with the whole cache (beams that are reordered, tokens
that are taken back) to the rank that has the contents, with the next request.

With gradients enabled, a cache crosses by value, with the gradients of its tensors, as for learned prompts.
"""

from shardwright.caches.elsewhere import Elsewhere
from shardwright.caches.handles import CacheAnswer, CacheHandle
from shardwright.caches.kinds import cache_class, copied, holds_cache, is_cache, replaced_in
from shardwright.caches.table import CacheTable, Received

__all__ = [
    "CacheAnswer",
    "CacheHandle",
    "CacheTable",
    "Elsewhere",
    "Received",
    "cache_class",
    "copied",
    "holds_cache",
    "is_cache",
    "replaced_in",
]
