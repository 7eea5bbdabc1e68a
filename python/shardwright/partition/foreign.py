"""Tensors that a forward uses, and that neither belong to the model nor were created by the forward.

They are plain attributes, held by closures or lists, or global. Every rank has its own copies of them, so a module that
reads one must run where it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwright.partition.preserve import Writes
from shardwright.partition.tree import ModelTree


class ForeignTensors:
    """Records who reads and writes foreign tensors while a forward is traced, and has them restored afterwards.

    Create it while the model runs with the buffers of the trace.
    """

    def __init__(self, tree: ModelTree, writes: Writes, arguments: object) -> None:
        """Register the model's own tensors, and those made for the trace."""
        self._writes = writes
        self._familiar: set[int] = set()
        self._readers: dict[int, set[str]] = {}
        self._writers: dict[int, set[str]] = {}
        # Keeps storages alive, because the id of a freed one may be reused.
        self._alive: dict[int, torch.Tensor] = {}
        for entry in (*tree.parameters, *tree.buffers):
            self.made(entry.tensor)
            self.made(entry.tensor.grad if entry.tensor.is_leaf else None)
        for module in tree.modules:
            self.made(list(module.module._buffers.values()))
        self.made(arguments)

    def made(self, values: object) -> None:
        """Record that the forward created these tensors, unless they are views of foreign ones."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                key = leaf.untyped_storage()._cdata
                if key not in self._readers:
                    self._familiar.add(key)

    def read(self, func: Any, tensors: Iterable[torch.Tensor], reader: str) -> None:
        """Record that an operation of the module at this path reads these tensors."""
        if func is torch.ops.aten.lift_fresh.default:  # called with the tensor that torch.tensor has just created
            self.made(tensors)
        for key, tensor in self._foreign(tensors):
            self._alive.setdefault(key, tensor)
            self._readers.setdefault(key, set()).add(reader)

    def written(self, tensor: torch.Tensor, writer: str) -> None:
        """Record that the module at this path is about to write to this tensor. Keep the values."""
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
        """Yield the paths of the modules that use a foreign tensor, for each tensor that one of them writes."""
        for key, writers in self._writers.items():
            yield writers | self._readers.get(key, set())

    def shared(self) -> Iterator[tuple[str, str]]:
        """Yield the path of each module that uses a written foreign tensor, with a module that writes it."""
        for key, writers in self._writers.items():
            writer = min(writers)
            for user in sorted(writers | self._readers.get(key, set())):
                yield user, writer
