"""Tensors that modules hold and that are neither parameters nor buffers, with their state before a forward."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwright.contents import INTERNAL, attributes_of
from shardwright.opaque import MAX_BYTES
from shardwright.partition.shared_state import AttributeKey, SharedState
from shardwright.partition.tree import ModelTree, address, join_path


class PlainTensor:
    """A tensor held by modules that is neither a parameter nor a buffer.

    Attributes:
        names: Full names of the attributes that hold it.
        holders: Paths of the modules that hold it.
        values: A copy of its values, unless it is large.
    """

    __slots__ = ("_data", "holders", "names", "tensor", "values")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Record the tensor's state."""
        self.tensor = tensor
        self.names: set[str] = set()
        self.holders: set[str] = set()
        self._data = tensor.data
        is_small = tensor.numel() * tensor.element_size() <= MAX_BYTES
        self.values = tensor.detach().clone() if is_small else None

    @property
    def is_exchanged(self) -> bool:
        """Whether it has other memory, or another shape, than before."""
        return address(self.tensor) != address(self._data) or self.tensor.shape != self._data.shape

    def restore(self) -> None:
        """Restore changes that no operation has reported, without changing the version."""
        if self.is_exchanged:
            self.tensor.data = self._data
        if self.values is not None and not torch.equal(self.tensor, self.values):
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.tensor):  # type: ignore[attr-defined]
                self.tensor.copy_(self.values)


def plain_tensors(tree: ModelTree, shared: SharedState) -> list[PlainTensor]:
    """Return the plain tensors that modules of `tree` hold in attributes, or in containers and objects of `shared`."""
    known = {id(entry.tensor) for entry in (*tree.parameters, *tree.buffers)}
    found: dict[int, PlainTensor] = {}
    for tensor, (module, name) in _held(tree, shared):
        if id(tensor) in known or type(tensor) is not torch.Tensor or not address(tensor) or tensor.is_inference():
            continue
        if (path := tree.path_of.get(module)) is not None:
            one = found.get(id(tensor)) or found.setdefault(id(tensor), PlainTensor(tensor))
            one.names.add(join_path(path, name))
            one.holders.add(path)
    return list(found.values())


def _held(tree: ModelTree, shared: SharedState) -> Iterator[tuple[torch.Tensor, AttributeKey]]:
    for entry in tree.modules:
        for name, value in attributes_of(entry.module).items():
            if isinstance(value, torch.Tensor) and name not in INTERNAL:
                yield value, (id(entry.module), name)
    yield from shared.held_tensors()
