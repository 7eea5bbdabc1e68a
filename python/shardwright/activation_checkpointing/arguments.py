"""Copies of the arguments that a module was called with, from which the backward computes it again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.execution.layout import layouts_of, restride
from shardwright.frames.remote import bring
from shardwright.offloading.tensors import Kept, OffloadedTensor, may_be_offloaded

#: By tensor, its version when it was copied, and the copy, which its users keep alive. A mask that is given to every
#: layer is copied once.
_copies: Any = WeakIdKeyDictionary()

_Copied = torch.Tensor | OffloadedTensor


class _KeptInMemory:
    """What all calls together keep in memory, as far as it may be offloaded, and the most of it.

    Attributes:
        now: Bytes, and calls that keep some.
        most: Those with the most bytes.
    """

    def __init__(self) -> None:
        self.now = self.most = (0, 0)
        self._lock = threading.RLock()  # calls end in any thread, also where the garbage collector happens to run

    def add(self, nbytes: int, calls: int) -> None:
        with self._lock:
            self.now = (self.now[0] + nbytes, self.now[1] + calls)
            self.most = max(self.most, self.now)


_in_memory = _KeptInMemory()


def most_kept() -> tuple[int, int]:
    """Return the most bytes that checkpointed calls kept in memory at once, and how many calls kept them."""
    return _in_memory.most


def forget_most_kept() -> None:
    """Begin anew with what is kept now."""
    _in_memory.most = _in_memory.now


class Arguments:
    """The arguments of a call.

    The script may write to its tensors after the call, and the module during it, so that tensors are copied. A tensor
    that only this call needs is freed when the caller no longer needs it, so that its copy takes its place.

    Attributes:
        copies: A copy of each tensor, detached, unless it is offloaded. The caller keeps them; this object does not.
        others: Other values, which are kept as they are.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], kept: Kept | None = None) -> None:
        """Copy the tensors among the arguments.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            kept: Keeps the copies of large tensors out of memory; None keeps all in memory.
        """
        leaves, self._structure = tree_flatten((args, dict(kwargs)))
        leaves = [bring(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        places: dict[int, int] = {}  # a tensor that is passed twice stays one tensor
        tensors: list[torch.Tensor] = []
        self._order: list[int | None] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in places:
                    places[id(leaf)] = len(tensors)
                    tensors.append(leaf)
                self._order.append(places[id(leaf)])
            else:
                self._order.append(None)
        self._needs = [tensor.requires_grad for tensor in tensors]
        # The layout of the arguments decides which kernels run, and therefore what they save for the backward.
        self._strides = [_strides_of(tensor) for tensor in tensors]
        self._kept = kept
        self._nbytes = 0
        copied = [self._copy(tensor, kept) for tensor in tensors]
        if self._nbytes:
            _in_memory.add(self._nbytes, 1)
        self.copies = [copy for copy in copied if isinstance(copy, torch.Tensor)]
        #: In the place of each tensor, what is known of it if it is offloaded.
        self._offloaded = [copy if isinstance(copy, OffloadedTensor) else None for copy in copied]
        # PyTorch asks the tensors that it keeps on which devices random numbers are drawn.
        devices = {tensor.device: None for tensor in tensors} if any(self._offloaded) else {}
        self.copies += [torch.empty(0, device=device) for device in devices if device.type == "cuda"]
        self.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def __del__(self) -> None:
        """Keep nothing any more."""
        if getattr(self, "_nbytes", 0):
            _in_memory.add(-self._nbytes, -1)

    @property
    def need_gradients(self) -> bool:
        """Whether a tensor among them requires a gradient."""
        return any(self._needs)

    def again(self, copies: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments once more, with tensors that the module may write to.

        Args:
            copies: The copies, which stay unchanged.

        Raises:
            OffloadError: An offloaded tensor has not come back.
        """
        loaded = self._kept.take() if self._kept is not None and any(self._offloaded) else {}
        resident = iter(copies)
        copies = tuple(next(resident) if kept is None else loaded[kept.number] for kept in self._offloaded)
        del loaded
        made = [
            _Copy.apply(copy.detach().requires_grad_(needs), strides)  # type: ignore[no-untyped-call]
            for copy, needs, strides in zip(copies, self._needs, self._strides, strict=True)
        ]
        leaves = [
            other if place is None else made[place] for place, other in zip(self._order, self.others, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs

    def _copy(self, tensor: torch.Tensor, kept: Kept | None) -> _Copied:
        if tensor.is_inference() or type(tensor) is not torch.Tensor:
            return tensor.detach().clone()
        version, reference = _copies.get(tensor, (-1, None))
        copy: _Copied | None = None if reference is None else reference()
        if isinstance(copy, OffloadedTensor) and (kept is None or not kept.share(copy)):
            copy = None
        if copy is None or version != tensor._version:
            copy = _copy_anew(tensor.detach(), kept)
            if isinstance(copy, torch.Tensor) and may_be_offloaded(copy):
                self._nbytes += copy.untyped_storage().nbytes()
            _copies[tensor] = tensor._version, weakref.ref(copy)
        return copy


def _strides_of(tensor: torch.Tensor) -> list[int] | None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    strides = layouts_of([tensor]).get("strides", ())
    return strides[0][1] if strides else None


def _copy_anew(tensor: torch.Tensor, kept: Kept | None) -> _Copied:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.clone()
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    if kept is not None and may_be_offloaded(once):
        return kept.add(once, tensor)
    return once.clone().expand(tensor.shape)  # an expanded tensor stays as small as it is


class _Copy(torch.autograd.Function):
    """Copy a tensor into a layout with the given strides; None keeps the tensor's layout."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, strides: list[int] | None) -> torch.Tensor:
        return tensor.clone() if strides is None else restride(tensor, strides)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
