"""Detection of forbidden in-place writes to tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright import _core
from shardwright.errors import FrameError

# Like torch.multiprocessing.reductions.StorageWeakRef, with fewer calls.
_refer: Callable[[Any], int] = torch.UntypedStorage._weak_ref  # type: ignore[assignment]
_free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref


def memory_id(tensor: torch.Tensor) -> int:
    """Return an id of the memory of a tensor, valid while the memory or a :class:`TensorMemory` of it exists."""
    return int(tensor.untyped_storage()._cdata)


class TensorMemory:
    """A weak reference to the memory of a tensor.

    Attributes:
        id: The id that :func:`memory_id` returns; not reused for other memory while this object exists.
    """

    __slots__ = ("id",)

    def __init__(self, tensor: torch.Tensor) -> None:
        """Create a weak reference to a tensor's memory."""
        self.id: int = _refer(tensor.untyped_storage())

    def __del__(self) -> None:
        """Release the weak reference."""
        if hasattr(self, "id"):  # not set for a tensor without memory of its own
            _free(self.id)


class RemoteMemory:
    """The tensors of a frame that share memory on other ranks, and those whose memory is kept there."""

    def __init__(self) -> None:
        """Create an empty record."""
        self._references: list[TensorMemory] = []
        self._group: dict[int, int] = {}
        self._kept: set[int] = set()

    def join(self, tensors: list[torch.Tensor]) -> None:
        """Record that tensors share memory on another rank."""
        memories = [TensorMemory(tensor) for tensor in tensors]
        self._references += memories
        joined = {self.group_of(memory.id) for memory in memories}
        target = min(joined)
        self._group.update({key: target for key, group in self._group.items() if group in joined})
        self._group.update({memory.id: target for memory in memories})

    def group_of(self, memory: int) -> int:
        """Return a number that is common to tensors sharing memory on another rank."""
        return self._group.get(memory, memory)

    def keep(self, tensor: torch.Tensor) -> None:
        """Record that the memory of a tensor is kept on another rank."""
        memory = TensorMemory(tensor)
        self._references.append(memory)
        self._kept.add(memory.id)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded."""
        return not self._references

    @property
    def keeps_any(self) -> bool:
        """Whether any memory is kept on another rank."""
        return bool(self._kept)

    def keeps(self, memory: int) -> bool:
        """Return whether the memory is kept on another rank."""
        return memory in self._kept


def kept_by_others(aliases: list[torch.Tensor], elsewhere: RemoteMemory) -> list[int]:
    """Find the tensors whose memory is also kept by something else, on this rank or on another one.

    Args:
        aliases: Tensors that nothing else refers to.
        elsewhere: The record of memory on other ranks.

    Returns:
        The indices of these tensors, in order.
    """
    here = _core.kept_by_others(aliases, torch._C._storage_Use_Count, _OWN_REFERENCES)
    if not elsewhere.keeps_any:
        return here
    there = [number for number, memory in enumerate(_core.memory_ids(aliases)) if elsewhere.keeps(memory)]
    return sorted({*here, *there})


_one = torch.empty(0)  # a variable, so that its memory exists during the query below
_OWN_REFERENCES = _core.references_to_storage(_one)
_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


class Watched:
    """A tensor that must not be written to, because copies on other ranks would not see the write.

    It keeps the tensor's version counter, which all views and aliases share and which outlives the tensor, but neither
    the tensor nor its memory, except for a sparse tensor. An inference tensor has no version: it is kept with a copy.
    """

    __slots__ = ("_counter", "_values", "_version", "why")

    def __init__(self, tensor: torch.Tensor, why: str) -> None:
        """Watch a tensor from now on; the error message begins with ``why``, which names the reason."""
        self.why = why
        self._values: torch.Tensor | None = None
        if tensor.is_inference():
            self._counter, self._version, self._values = tensor, 0, tensor.clone()
            return
        key = (tensor.dtype, tensor.device)
        empty = _empty.get(key)
        if empty is None:
            with torch.inference_mode(False):
                empty = _empty[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._counter = tensor.detach()
        if tensor.layout is torch.strided:  # the memory of a sparse tensor cannot be released
            self._counter.data = empty
        self._version = tensor._version

    def check(self, microbatch: int) -> None:
        """Raise :class:`FrameError` if the tensor was written to."""
        if self._values is None:
            changed = self._counter._version != self._version
        else:
            changed = not torch.allclose(self._counter, self._values, rtol=0.0, atol=0.0, equal_nan=True)
        if changed:
            raise FrameError(
                f"{self.why}, and it was written to in place later (microbatch {microbatch}): across ranks that write "
                "cannot be seen everywhere where it should be; write to a clone(), or have the module use a clone()"
            )
