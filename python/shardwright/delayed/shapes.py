"""Tensors that have a shape and never values, in the place of delayed parameters for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.delayed.tensor import DelayedTensor, exchange, refuse_views, wrapper_like
from shardwright.dispatch_mode import write_positions
from shardwright.errors import ShardwrightError

_ATEN = torch.ops.aten
_DATA_SET = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: Operators that write to statistics which are not read again in the same forward.
_KEEPING_STATISTICS = frozenset((_ATEN.native_batch_norm.default, _ATEN.cudnn_batch_norm.default))


class NoValuesError(ShardwrightError):
    """An operation needs the values of a tensor that has none."""


class ShapeTensor(torch.Tensor):
    """A tensor on a device that has no values: what is computed from it has none either, and takes no time.

    Attributes:
        meta: A tensor on the meta device with its shape, which is a view where it is one.
    """

    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> ShapeTensor:
        """Make one like a tensor on the meta device."""
        made: ShapeTensor = wrapper_like(cls, meta, device)
        made.meta = meta
        return made

    def __init__(self, meta: torch.Tensor, device: torch.device) -> None:
        """All is done in ``__new__``."""
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle what never gets to the dispatcher."""
        if func == _DATA_SET and isinstance(args[0], ShapeTensor) and isinstance(args[1], ShapeTensor):
            return exchange(args[0], ShapeTensor(args[1].meta, args[1].device))
        if func is torch.Tensor.untyped_storage:
            return args[0].meta.untyped_storage()
        if func is torch.Tensor.data_ptr:
            return 0
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator on the meta device. Tensors with values may take part, but not be written to."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        given = {id(leaf.meta): leaf for leaf in leaves if isinstance(leaf, ShapeTensor)}
        device = kwargs.get("device") or next(iter(given.values())).device
        if func not in _KEEPING_STATISTICS:
            for index, name in write_positions(func):
                written = tree_leaves(args[index] if index < len(args) else kwargs.get(name))
                if any(isinstance(one, torch.Tensor) and not isinstance(one, ShapeTensor) for one in written):
                    raise NoValuesError(f"{func} writes something without values to a tensor with values")
        try:
            result = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        except (RuntimeError, NotImplementedError) as problem:
            raise NoValuesError(f"{func} needs values: {problem}") from problem

        def wrapped(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            known = given.get(id(leaf))
            return ShapeTensor(leaf, torch.device(device)) if known is None else known

        return tree_map(wrapped, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say its shape."""
        return f"tensor without values, shape={tuple(self.shape)}, dtype={self.dtype}"


def _on_meta(leaf: object) -> object:
    if isinstance(leaf, ShapeTensor):
        return leaf.meta
    if isinstance(leaf, torch.Tensor):
        return leaf.to("meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


@contextlib.contextmanager
def as_shapes(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Make delayed tensors such without values within the block; they remain the same objects.

    Their operations are kept meanwhile, and nothing is computed. Other tensors are ignored.
    """
    exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor in {id(each): each for each in tensors}.values():
            if isinstance(tensor, DelayedTensor):
                refuse_views(tensor)
                with torch.inference_mode(False):
                    other = ShapeTensor(tensor.meta, tensor.device).requires_grad_(tensor.requires_grad)
                if isinstance(tensor, nn.Parameter):
                    other._is_param = True
                exchange(tensor, other)
                exchanged.append((tensor, other))
        yield
    finally:
        for tensor, other in reversed(exchanged):
            exchange(tensor, other)
