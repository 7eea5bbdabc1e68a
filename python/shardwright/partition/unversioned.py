"""Finds writes of a forward that do not change a tensor's version: through `.data`, or by batch normalization.

A backward that needs such a buffer or plain tensor silently reads the values that later microbatches have left in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from shardwright.partition.observe import Stack
from shardwright.partition.plain import PlainTensor
from shardwright.partition.tree import ModelTree, TensorEntry

#: Operations whose backward does not need their arguments.
_SAVES_NOTHING = frozenset({"clone", "copy_", "_to_copy", "_local_scalar_dense", "add", "sub", "add_", "sub_"})


class _Watched(NamedTuple):
    tensor: torch.Tensor
    version: int
    names: tuple[str, ...]
    holders: tuple[str, ...]
    before: TensorEntry | PlainTensor

    def has_changed(self) -> bool:
        if isinstance(self.before, TensorEntry):
            return not _has_values_of(self.tensor.to(self.before.tensor.device), self.before.tensor)
        values = self.before.values
        return self.before.is_exchanged or (values is not None and not _has_values_of(self.tensor, values))


class UnversionedWrites:
    """Records accesses to buffers and plain tensors in one forward of a model, by their memory."""

    def __init__(self, tree: ModelTree, stack: Stack, plain: Iterable[PlainTensor]) -> None:
        """Register the plain tensors and the buffers, which must already be those of the trace."""
        self._stack = stack
        self._watched: list[_Watched] = []
        for entry in tree.modules:
            for name, index in entry.buffers.items():
                buffer, of = entry.module._buffers[name], tree.buffers[index]
                if buffer is not None and buffer.layout is torch.strided and not buffer.is_meta:
                    self._watched.append(_Watched(buffer, buffer._version, of.names, of.holders, of))
        for one in plain:
            names, holders = tuple(sorted(one.names)), tuple(sorted(one.holders))
            self._watched.append(_Watched(one.tensor, one.tensor._version, names, holders, one))
        self._by_id = {id(one.tensor): index for index, one in enumerate(self._watched)}
        self._by_memory = {one.tensor.untyped_storage()._cdata: index for index, one in enumerate(self._watched)}
        self._destinations: set[int] = set()
        self._written: dict[int, set[str]] = {}
        #: Tensors whose values a backward may need, and the users of each.
        self._needed: set[int] = set()
        self._users: dict[int, set[str]] = {}

    def written(self, tensor: torch.Tensor) -> None:
        """Record that the next operation writes to this tensor."""
        index = self._index_of(tensor)
        if index is not None:
            self._destinations.add(id(tensor))
            self._written.setdefault(index, set()).add(self._stack.top.path)

    def operation(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """Record an operation with these tensor arguments."""
        for tensor in tensors if self._watched else ():
            index = self._index_of(tensor)
            if index is not None and id(tensor) not in self._destinations:
                self._users.setdefault(index, set()).add(self._stack.top.path)
                if not _saves_nothing(func):
                    self._needed.add(index)
        self._destinations.clear()

    def _index_of(self, tensor: torch.Tensor) -> int | None:
        index = self._by_id.get(id(tensor))
        if index is None and tensor.layout is torch.strided and not tensor.is_meta:
            try:
                index = self._by_memory.get(tensor.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):  # a tensor of torch.func, or of another kind
                return None
        return index

    def found(self) -> Iterator[tuple[tuple[str, ...], set[str], bool]]:
        """Yield, after the forward: names, users including writers, and whether a backward may need the values."""
        for index, one in enumerate(self._watched):
            if one.tensor._version == one.version and (index in self._written or one.has_changed()):
                users = self._written.get(index, set()) | self._users.get(index, set())
                yield one.names, users or set(one.holders), index in self._needed


def _saves_nothing(func: Any) -> bool:
    """Return whether the backward of an operation is known not to need its arguments."""
    is_view: bool = getattr(func, "is_view", False)
    return is_view or getattr(getattr(func, "overloadpacket", None), "__name__", "") in _SAVES_NOTHING


def _has_values_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def silently_written(tree: ModelTree, buffers: Iterable[tuple[int, torch.Tensor]]) -> set[int]:
    """Return the indices of the buffers of a trace whose values differ from the model's own.

    Batch normalization writes to its buffers, but the operation's schema does not say so.
    """
    own = [(index, buffer, tree.buffers[index].tensor) for index, buffer in buffers if not buffer.is_meta]
    return {index for index, buffer, tensor in own if not torch.equal(buffer.to(tensor.device), tensor)}
