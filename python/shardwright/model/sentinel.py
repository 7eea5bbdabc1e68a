"""Placeholders for parameters and buffers whose values are on another rank.

A sentinel answers queries about shape, dtype and device, so that code that only reads metadata works on every rank. It
raises an error for every operation that needs the values. It is a wrapper tensor, not a meta tensor, because a meta
tensor reports the wrong device and computes without an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shardwright import quantized
from shardwright.delayed.materialise import forget
from shardwright.devices import with_index
from shardwright.errors import NotOwnedError
from shardwright.frames import current_frame
from shardwright.model.whole import HINTS, whole_call
from shardwright.patches import original_of

_Function = Callable[..., Any]
#: The module with the function that would compute the norm of one rank's gradients only.
_CLIPPING = "torch.nn.utils.clip_grad"


def _getters(*names: str) -> list[_Function]:
    return [getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)]


def _setter(name: str) -> _Function:
    setter: _Function = getattr(torch.Tensor, name).__set__
    return setter


def _methods(*names: str) -> list[_Function]:
    return [getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)]


# Functions that need only metadata, where this version of PyTorch has them.
_METADATA: frozenset[_Function] = frozenset(
    _getters(
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "nbytes", "itemsize",
        "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_xpu", "is_mps",
        "is_nested", "output_nr", "retains_grad", "_version", "names", "_backward_hooks", "_base",
    )
    + _methods(
        "size", "stride", "numel", "nelement", "dim", "ndimension", "element_size", "storage_offset", "get_device",
        "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference",
        "is_same_size", "has_names", "type", "__len__", "_is_view", "is_shared", "requires_grad_",
    )
    + [
        torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.is_inference,
        torch.is_conj, torch.is_neg, torch._has_compatible_shallow_copy_type,
        _setter("requires_grad"),
    ]
)  # fmt: skip

# Functions that return another sentinel: `state_dict()` and `Module.to()` apply them to each parameter.
_CONVERSIONS: frozenset[_Function] = frozenset(
    _getters("data")
    + _methods("detach", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type_as")
    + [torch.detach]
)
_CONVERSION_OPERATIONS = frozenset(
    {torch.ops.aten._to_copy.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default}
)
# Functions that need no values either; optimizers create their state with them.
_LIKE: dict[_Function, _Function] = {
    torch.zeros_like: torch.zeros,
    torch.ones_like: torch.ones,
    torch.full_like: torch.full,
    torch.empty_like: torch.empty,
}
_GRAD_GET = _getters("grad")[0]
_GRAD_SET = _setter("grad")
_DATA_SET = _setter("data")
#: Settings that have no effect if only one rank makes them.
_SETTINGS = frozenset([torch.Tensor.requires_grad_, _setter("requires_grad")])
_HOOKS = frozenset(_methods("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))


class IgnoredHook:
    """Handle of a hook on a parameter of another rank. The hook runs on the rank that owns the parameter."""

    def remove(self) -> None:
        """Do nothing, because nothing was registered."""


class Sentinel(torch.Tensor):
    """A parameter or buffer that another rank owns: metadata without values.

    It knows its full name in the model, whether it is a ``"parameter"`` or a ``"buffer"``, and the pp_rank that owns
    it.
    """

    sentinel_name: str
    sentinel_kind: str
    sentinel_owner: int
    _is_param: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, *, name: str, owner: int, is_parameter: bool) -> Sentinel:
        """Create a sentinel with the metadata of `like`, without its values."""
        result = _with_metadata_of(like, {}, requires_grad=like.requires_grad)
        result.sentinel_name = name
        result.sentinel_owner = owner
        result.sentinel_kind = "parameter" if is_parameter else "buffer"
        if is_parameter:
            # PyTorch recognizes parameters of custom tensor types by this attribute.
            result._is_param = True
        return result

    def __init__(self, like: torch.Tensor, *, name: str, owner: int, is_parameter: bool) -> None:
        """Do nothing: ``__new__`` sets all attributes."""
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: _Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer from metadata, or raise an error."""
        kwargs = kwargs or {}
        func = original_of(func)  # PyTorch looks up methods by name, which gives the library's replacements
        if func in _SETTINGS:
            _refuse_in_step(func, args[0])
        if func in _METADATA or func in _CONVERSIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _LIKE:
            return _filled(_LIKE[func], *args, **kwargs)
        if func is torch.Tensor.__hash__:
            return id(args[0])
        if func == _GRAD_GET:
            _refuse_reading_gradient(args[0])
            return None
        if func == _GRAD_SET and args[1] is None:
            return None
        if func == _DATA_SET and isinstance(args[0], Sentinel) and isinstance(args[1], Sentinel):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _HOOKS:
            _refuse_in_step(func, args[0])
            return IgnoredHook()
        _refuse(func, (args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Convert metadata, or raise an error for operations that bypassed ``__torch_function__``."""
        kwargs = kwargs or {}
        if func in _CONVERSION_OPERATIONS:
            source: Sentinel = args[0]
            result = _with_metadata_of(source, kwargs, requires_grad=False)
            for field in ("sentinel_name", "sentinel_owner", "sentinel_kind"):
                setattr(result, field, getattr(source, field))
            return result
        _refuse(func, (args, kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the name of the tensor, its metadata and its owner."""
        shape = tuple(self.shape)
        return (
            f"Sentinel({self.sentinel_kind} {self.sentinel_name!r} on pp_rank {self.sentinel_owner}, "
            f"shape={shape}, dtype={self.dtype}, device={str(self.device)!r})"
        )

    def __format__(self, format_spec: str) -> str:
        """Format the result of ``repr``."""
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raise an error: there are no values to copy."""
        raise NotOwnedError(_message(self, "copy.deepcopy"))

    def __reduce_ex__(self, proto: SupportsIndex) -> NoReturn:
        """Raise an error: there are no values to save."""
        raise NotOwnedError(_message(self, "pickling"))


def _with_metadata_of(like: torch.Tensor, changed: dict[str, Any], *, requires_grad: bool) -> Sentinel:
    """Return a sentinel without a name, like a tensor except for the dtype and device that a conversion changes."""
    return torch.Tensor._make_wrapper_subclass(
        Sentinel,
        like.shape,
        strides=like.stride() if like.layout is torch.strided else None,
        dtype=changed.get("dtype") or like.dtype,
        layout=torch.strided,
        device=with_index(changed.get("device") or like.device),
        requires_grad=requires_grad,
    )


class ReleasedParameter(nn.Parameter):
    """A parameter object that was handed out before the partition and is owned by another rank.

    An optimizer or a list may still hold it. It has no storage and behaves like the sentinel that replaced it.
    """

    released_to: Sentinel

    @classmethod
    def __torch_function__(
        cls, func: _Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply the function to the sentinel instead."""
        if func is torch.Tensor.__hash__:
            return id(args[0])
        args, kwargs = tree_map(
            lambda item: item.released_to if isinstance(item, ReleasedParameter) else item, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the representation of the sentinel."""
        return repr(self.released_to)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raise an error: there are no values to copy."""
        raise NotOwnedError(_message(self.released_to, "copy.deepcopy"))

    def __reduce_ex__(self, proto: SupportsIndex) -> NoReturn:
        """Raise an error: there are no values to save."""
        raise NotOwnedError(_message(self.released_to, "pickling"))


#: The types of placeholders for another rank's tensors.
PLACEHOLDERS = frozenset((Sentinel, ReleasedParameter))


def is_sentinel(value: object) -> bool:
    """Return whether `value` is a placeholder for a tensor that another rank owns."""
    return type(value) in PLACEHOLDERS  # exact types: an instance check of parameters costs a Python call


def release(original: torch.Tensor, sentinel: Sentinel, holders: Sequence[nn.Module] = ()) -> None:
    """Free the storage of a parameter that `sentinel` replaces, whatever still holds a reference to the parameter.

    Only this object gives up the memory: a storage that other tensors share remains allocated for them. What the
    modules that hold it keep beside a weight of few bits is freed too.
    """
    original.grad = None
    quantized.describe(original, sentinel)
    forget(original)
    if quantized.release(original, holders):
        return
    if type(original) is not nn.Parameter:
        # Custom tensor types define their own storage, so it is only safe to drop the reference from the module.
        return
    original.data = torch.empty(0, dtype=original.dtype, device=original.device)
    original.__class__ = ReleasedParameter
    original.released_to = sentinel  # type: ignore[attr-defined]


def _filled(
    make: _Function, sentinel: Sentinel, *values: Any, memory_format: object = None, **kwargs: Any
) -> torch.Tensor:
    """Return a tensor with the shape of a sentinel, expanded from a single element."""
    kwargs = {"dtype": sentinel.dtype, "device": sentinel.device, **kwargs}
    if "fill_value" in kwargs:
        values = (kwargs.pop("fill_value"),)
    made: torch.Tensor = make((), *values, **kwargs)
    return made.expand(sentinel.shape)


def _first_sentinel(values: object) -> Sentinel | None:
    found: list[Sentinel] = []

    def look(item: object) -> object:
        if isinstance(item, Sentinel):
            found.append(item)
        return item

    tree_map(look, values)
    return found[0] if found else None


def _refuse(func: Any, values: object) -> NoReturn:
    sentinel = _first_sentinel(values)
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    if sentinel is None:
        raise NotOwnedError(f"{name} was given a parameter or buffer that another rank owns")
    raise NotOwnedError(_message(sentinel, name))


def _refuse_in_step(func: Any, sentinel: Sentinel) -> None:
    frame = current_frame()
    if frame is not None:
        name = getattr(func, "__name__", "")
        name = "requires_grad" if name == "__set__" else name
        raise NotOwnedError(
            f"{name} was set on {sentinel.sentinel_kind} {sentinel.sentinel_name!r} in the code of {frame.name}, but "
            f"it lives on pp_rank {sentinel.sentinel_owner}, which would not see it: do that outside the step "
            "function, on every rank"
        )


def _refuse_reading_gradient(sentinel: Sentinel) -> None:
    frame = current_frame()
    if frame is not None:
        raise NotOwnedError(
            f"the gradient of {sentinel.sentinel_kind} {sentinel.sentinel_name!r} was read in the code of "
            f"{frame.name}, but it is on pp_rank {sentinel.sentinel_owner}, and complete only after the step: read "
            "(and zero) gradients outside the step function, from model.local_parameters()"
        )
    caller = sys._getframe(2)
    for _ in range(3):  # bypasses the sentinel's own function
        if caller.f_globals.get("__name__") == _CLIPPING and "clip_grad_norm_" in caller.f_code.co_qualname:
            raise NotOwnedError(
                f"torch.nn.utils.clip_grad_norm_ was given {sentinel.sentinel_kind} {sentinel.sentinel_name!r}, whose "
                f"gradient is on pp_rank {sentinel.sentinel_owner}: this rank would clip by the norm of its own part. "
                "Use smp.clip_grad_norm_(model.parameters(), max_norm) on every rank of the pipeline"
            )
        if caller.f_back is None:
            break
        caller = caller.f_back


def _message(sentinel: Sentinel, operation: str) -> str:
    whole = whole_call(operation)
    if whole is not None:
        return (
            f"{whole} needs the values of all parameters, but those of {sentinel.sentinel_kind} "
            f"{sentinel.sentinel_name!r} live on pp_rank {sentinel.sentinel_owner}: {HINTS[whole]}"
        )
    module = sentinel.sentinel_name.rpartition(".")[0]
    holder = f"module {module!r}" if module else "the model itself"
    return (
        f"{operation} needs the values of {sentinel.sentinel_kind} {sentinel.sentinel_name!r}, which live on pp_rank "
        f"{sentinel.sentinel_owner}; this rank knows only its shape {tuple(sentinel.shape)}, dtype {sentinel.dtype} "
        f"and device. Call {holder} instead of computing with its tensors, place the module that reads them on "
        f"pp_rank {sentinel.sentinel_owner} too (smp.set_partition), or use model.local_parameters(), "
        "model.state_dict(), model.load_state_dict(), and smp.AveragedModel for averaged copies"
    )
