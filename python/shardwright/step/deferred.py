"""Large tensors that a step function returned. They stay on the root until another rank uses them."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from shardwright import _core
from shardwright.errors import ShardwrightError
from shardwright.execution.sparse import has_parts, put_together, take_apart
from shardwright.job.exchange import receive_object
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.values import decode, encode, registry

#: Returned tensors of more bytes than this are sent only to ranks that use them.
MAX_SENT_BYTES = 1 << 16


class DeferredTensor:
    """A returned tensor that the root keeps for this rank until it is used or no longer referenced."""

    __slots__ = ("__weakref__", "_key", "_release", "_root", "_runtime")

    def __init__(self, root: int, key: int) -> None:
        """Refer to the tensor that global rank ``root`` has published under ``key``."""
        self._root = root
        self._key = key
        self._runtime: Runtime | None = None
        self._release: Any = None

    @staticmethod
    def publish(runtime: Runtime, tensor: torch.Tensor) -> DeferredTensor:
        """Keep a tensor for the other ranks of the pipeline. Called on the root."""
        key = runtime.node.publish(*encode(tensor.detach()), runtime.place.pp_ranks[1:])
        return DeferredTensor(runtime.place.rank, key)

    @staticmethod
    def received(fields: tuple[int, int]) -> DeferredTensor:
        """Create the object on another rank from the fields that were sent."""
        runtime = current_runtime()
        deferred = DeferredTensor(*fields)
        deferred._runtime = runtime
        deferred._release = weakref.finalize(deferred, _release, runtime, *fields)
        deferred._release.atexit = False
        return deferred

    def fields(self) -> tuple[int, int]:
        """Return the fields to send: the root's global rank and the key."""
        return self._root, self._key

    def fetch(self) -> torch.Tensor:
        """Fetch the tensor from the root. Call this method only once."""
        assert self._runtime is not None, "the root has the tensor itself"
        self._release.detach()
        channel = self._runtime.node.fetch(self._root, self._key)
        tensor: torch.Tensor = decode(*receive_object(self._runtime, self._root, channel))
        return tensor


def _release(runtime: Runtime, root: int, key: int) -> None:
    """Notify the root that this rank no longer needs the tensor, unless the root is no longer there."""
    with contextlib.suppress(ShardwrightError):
        runtime.node.release(root, key)


registry.add(DeferredTensor, "shardwright:DeferredTensor", DeferredTensor.fields, DeferredTensor.received)


#: Dense tensors, and what is needed to build a sparse or a nested tensor from them.
_Fields = tuple[list[torch.Tensor], tuple[int, int, list[int], bool] | None, tuple[int, int, int] | None]


class ResultOfParts:
    """A returned sparse or nested tensor in the form in which it is sent. The receiver gets the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Decompose the tensor into dense tensors."""
        self._tensors, ((_, self._composite),) = take_apart([tensor.detach()], "the result of a step")

    def fields(self) -> _Fields:
        """Return the fields to send: the dense tensors, and how to build the tensor from them."""
        return self._tensors, self._composite.sparse, self._composite.nested

    @staticmethod
    def received(fields: _Fields) -> torch.Tensor:
        """Build the tensor from the fields."""
        tensors, sparse, nested = fields
        if sparse is not None:
            composite = _core.Composite.of_sparse(*sparse)
        else:
            assert nested is not None, "it is sparse or nested"
            composite = _core.Composite.of_nested(*nested)
        return put_together(tensors, [(0, composite)])[0]


registry.add(ResultOfParts, "shardwright:ResultOfParts", ResultOfParts.fields, ResultOfParts.received)


def deferring_large(runtime: Runtime, tensor: torch.Tensor) -> Any:
    """Return the tensor itself or, for a large one, the object that represents it on the other ranks."""
    if has_parts(tensor):
        return ResultOfParts(tensor)
    if tensor.numel() * tensor.element_size() <= MAX_SENT_BYTES:
        return tensor
    return DeferredTensor.publish(runtime, tensor)
