"""Large tensors that a step function returned: they stay on the root until another rank uses them."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from shardwright import _core
from shardwright.errors import ShardwrightError
from shardwright.execution.sparse import has_parts, put_together, take_apart
from shardwright.job.exchange import receive_object
from shardwright.job.runtime import current_runtime
from shardwright.values import decode, encode, registry

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

#: Returned tensors of more bytes than this are sent only to ranks that use them.
MAX_SENT_BYTES = 1 << 16


class DeferredTensor:
    """A returned tensor that the root keeps for this rank until it is used, or no longer wanted."""

    __slots__ = ("__weakref__", "_key", "_release", "_root", "_runtime")

    def __init__(self, root: int, key: int) -> None:
        """Name the tensor that global rank ``root`` has published under ``key``."""
        self._root = root
        self._key = key
        self._runtime: Runtime | None = None
        self._release: Any = None

    @staticmethod
    def publish(runtime: Runtime, tensor: torch.Tensor) -> DeferredTensor:
        """On the root: keep a tensor for the other ranks of the pipeline."""
        key = runtime.node.publish(*encode(tensor.detach()), runtime.place.pp_ranks[1:])
        return DeferredTensor(runtime.place.rank, key)

    @staticmethod
    def received(fields: tuple[int, int]) -> DeferredTensor:
        """On another rank: from what travelled."""
        runtime = current_runtime()
        deferred = DeferredTensor(*fields)
        deferred._runtime = runtime
        deferred._release = weakref.finalize(deferred, _release, runtime, *fields)
        deferred._release.atexit = False
        return deferred

    def fields(self) -> tuple[int, int]:
        """Return what travels: the root's global rank and the key."""
        return self._root, self._key

    def fetch(self) -> torch.Tensor:
        """Bring the tensor here; once.

        Raises:
            PeerLostError: The root is gone.
        """
        assert self._runtime is not None, "the root has the tensor itself"
        self._release.detach()
        channel = self._runtime.node.fetch(self._root, self._key)
        tensor: torch.Tensor = decode(*receive_object(self._runtime, self._root, channel))
        return tensor


def _release(runtime: Runtime, root: int, key: int) -> None:
    """Tell the root that nobody here wants the tensor; one that is gone keeps none."""
    with contextlib.suppress(ShardwrightError):
        runtime.node.release(root, key)


registry.add(DeferredTensor, "shardwright:DeferredTensor", DeferredTensor.fields, DeferredTensor.received)


#: Dense tensors, and what makes a sparse or a nested one of them.
_Fields = tuple[list[torch.Tensor], tuple[int, int, list[int], bool] | None, tuple[int, int, int] | None]


class ResultOfParts:
    """Stands for a returned sparse or nested tensor on its way, which arrives as itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Take it apart."""
        self._tensors, ((_, self._composite),) = take_apart([tensor.detach()], "the result of a step")

    def fields(self) -> _Fields:
        """Its parts, and what it is."""
        return self._tensors, self._composite.sparse, self._composite.nested

    @staticmethod
    def received(fields: _Fields) -> torch.Tensor:
        """Return the tensor."""
        tensors, sparse, nested = fields
        if sparse is not None:
            composite = _core.Composite.of_sparse(*sparse)
        else:
            assert nested is not None, "it is sparse or nested"
            composite = _core.Composite.of_nested(*nested)
        return put_together(tensors, [(0, composite)])[0]


registry.add(ResultOfParts, "shardwright:ResultOfParts", ResultOfParts.fields, ResultOfParts.received)


def deferring_large(runtime: Runtime, tensor: torch.Tensor) -> Any:
    """Return the tensor itself, or for a large one what stands for it on the other ranks."""
    if has_parts(tensor):
        return ResultOfParts(tensor)
    if tensor.numel() * tensor.element_size() <= MAX_SENT_BYTES:
        return tensor
    return DeferredTensor.publish(runtime, tensor)
