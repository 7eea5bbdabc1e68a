"""Tensors that a forward uses, that are not the model's and that it did not make.

They are plain attributes, held by closures or lists, or global. Every rank has its own copies of them, so whoever reads
one must run where it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwright.partition.preserve import Writes
from shardwright.partition.tree import ModelTree


class ForeignTensors:
    """Notes who reads and writes them while a forward is traced, and has them put back afterwards.

    Make it once the model runs with the buffers of the trace in place.
    """

    def __init__(self, tree: ModelTree, writes: Writes, arguments: object) -> None:
        """Know the model's own tensors, and those made for the trace."""
        self._writes = writes
        self._familiar: set[int] = set()
        self._readers: dict[int, set[str]] = {}
        self._writers: dict[int, set[str]] = {}
        # A storage that is freed gives its number to another one.
        self._alive: dict[int, torch.Tensor] = {}
        for entry in (*tree.parameters, *tree.buffers):
            self.made(entry.tensor)
            self.made(entry.tensor.grad if entry.tensor.is_leaf else None)
        for module in tree.modules:
            self.made(list(module.module._buffers.values()))
        self.made(arguments)

    def made(self, values: object) -> None:
        """The forward itself made these tensors, unless they are views of foreign ones."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                key = leaf.untyped_storage()._cdata
                if key not in self._readers:
                    self._familiar.add(key)

    def read(self, func: Any, tensors: Iterable[torch.Tensor], reader: str) -> None:
        """An operation of the module at this path computes with these tensors."""
        if func is torch.ops.aten.lift_fresh.default:  # of the tensor that torch.tensor has just made
            self.made(tensors)
        for key, tensor in self._foreign(tensors):
            self._alive.setdefault(key, tensor)
            self._readers.setdefault(key, set()).add(reader)

    def written(self, tensor: torch.Tensor, writer: str) -> None:
        """The module at this path is about to write to this tensor."""
        for key, _ in self._foreign((tensor,)):
            if key not in self._writers:
                with torch.inference_mode(False):
                    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
                self._alive[key] = whole
                self._writes.keep(whole)
            self._writers.setdefault(key, set()).add(writer)

    def _foreign(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                key = tensor.untyped_storage()._cdata
                if key not in self._familiar:
                    yield key, tensor

    def changed(self) -> Iterator[set[str]]:
        """Yield paths of the modules that use a tensor which one of them writes."""
        for key, writers in self._writers.items():
            yield writers | self._readers.get(key, set())

    def shared(self) -> Iterator[tuple[str, str]]:
        """Yield paths of modules that read or write a tensor, each with one that writes it."""
        for key, writers in self._writers.items():
            writer = min(writers)
            for user in sorted(writers | self._readers.get(key, set())):
                yield user, writer
