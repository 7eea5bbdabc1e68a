"""Tensors' bytes: copied out of torch's memory when sent, wrapped without a copy when received."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from shardwright import _core
from shardwright.errors import UnsupportedValueError
from shardwright.frames.remote import bring_all

#: The dtypes whose elements are whole bytes, as far as this torch has them; the extension knows the same ones.
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}
_from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack  # without the checks of what is no capsule
_NOT_ELSEWHERE: Mapping[int, Any] = MappingProxyType({})


#: A tensor's dtype, shape, strides, device and whether it requires a gradient.
Meta = tuple[str, list[int], list[int], str, bool]
#: A tensor that another rank holds: what it is like; that rank, who asked for it, the request, and its place in the
#: answer.
Origin = tuple[Meta, int, int, int, int]


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a tensor that crosses ranks, by its name without ``torch.``."""
    return _DTYPES[name]


def pack(
    tensors: list[torch.Tensor], requires_grad: list[bool], origins: Mapping[int, Origin] = _NOT_ELSEWHERE
) -> _core.TensorParts:
    """Copy tensors into a body.

    Dense tensors keep their strides; others are sent contiguous. Tensors on a GPU are copied in the order of the
    current stream, and nobody waits for that where the connection can tell when they are there.

    Args:
        tensors: Any strided tensors.
        requires_grad: For each whether the receiver shall make it require a gradient.
        origins: By index, those that go to the receiver from the rank that holds them.

    Raises:
        UnsupportedValueError: A tensor is sparse, quantized, nested, on the meta device, or of a special subclass.
    """
    parts = _core.TensorParts()
    here = [tensor for index, tensor in enumerate(tensors) if index not in origins] if origins else tensors
    # All are looked at before the first copy.
    dense = [_dense(tensor) for tensor in bring_all(here)]
    dense.reverse()
    for index, need in enumerate(requires_grad):
        if index in origins:
            (dtype, shape, strides, device_type, _), holder, requester, request, place = origins[index]
            held = {"holder": holder, "requester": requester, "request": request, "index": place}
            parts.append_held(dtype, shape, strides, device_type, need, **held)
        else:
            _append(parts, dense.pop(), need)
    return parts


def _append(parts: _core.TensorParts, tensor: torch.Tensor, requires_grad: bool) -> None:
    device_type = tensor.device.type
    if device_type == "cuda":
        if _append_device(parts, tensor, requires_grad):
            return
        tensor = _on_host(tensor)
    parts.append(tensor, _NAMES[tensor.dtype], device_type, requires_grad)


def _append_device(parts: _core.TensorParts, tensor: torch.Tensor, requires_grad: bool) -> bool:
    """Add a dense tensor of a GPU behind what its current stream has to do; False where that is not possible."""
    stream = torch.cuda.current_stream(tensor.device)
    # The allocator may have made it for another stream.
    tensor.detach().record_stream(stream)
    return parts.append_device(
        tensor.data_ptr(),
        tensor.nbytes,
        _NAMES[tensor.dtype],
        tensor.shape,
        tensor.stride(),
        requires_grad,
        ordinal=tensor.device.index,
        stream=stream.cuda_stream,
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, so that strides can travel."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def refuse_kind(tensor: torch.Tensor) -> None:
    """Raise `UnsupportedValueError` if no tensor of this kind can cross ranks."""
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        name = type(tensor).__qualname__
        text = f"a tensor of the subclass {name} cannot cross ranks; convert it to a plain tensor"
        raise UnsupportedValueError(text, name)
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.dtype not in _NAMES:
        raise _without_bytes(tensor)


def _without_bytes(tensor: torch.Tensor) -> UnsupportedValueError:
    layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return UnsupportedValueError(
        f"a {layout} tensor of dtype {tensor.dtype} on device {tensor.device} cannot cross ranks; only strided "
        "tensors with values of whole bytes can: convert it, for example by .to_dense() or .dequantize()",
        f"{layout} tensor of dtype {tensor.dtype}",
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in dense memory, for reading its address."""
    refuse_kind(tensor)
    if tensor.is_meta:
        raise _without_bytes(tensor)
    plain = tensor
    if tensor.is_conj() or tensor.is_neg():
        plain = tensor.detach().resolve_conj().resolve_neg()
    if not is_dense(plain):
        plain = plain.detach().contiguous()
    return plain


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor of a GPU in host memory, once its current stream has come that far."""
    host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def unpack(parts: _core.TensorParts) -> list[torch.Tensor]:
    """Make the tensors of a received body, each the only owner of its memory; none requires a gradient."""
    return [unpack_one(parts, index) for index in range(len(parts))]


def unpack_one(parts: _core.TensorParts, index: int) -> torch.Tensor:
    """Make one tensor of a received body; each can be made once."""
    if _has_device() and parts.is_of_device(index):
        return _on_device(parts, index)
    return _wrapped(parts, index)


@functools.cache
def _has_device() -> bool:
    return torch.cuda.is_available()


def _on_device(parts: _core.TensorParts, index: int) -> torch.Tensor:
    """A tensor of the current GPU, from the bytes of one that came from a GPU."""
    dtype, shape, strides, _, _ = parts.meta(index)
    tensor = torch.empty_strided(shape, strides, dtype=_DTYPES[dtype], device="cuda")
    stream = torch.cuda.current_stream(tensor.device)
    if parts.take_into_device(index, tensor.data_ptr(), ordinal=tensor.device.index, stream=stream.cuda_stream):
        return tensor
    return tensor.copy_(_wrapped(parts, index).pin_memory(), non_blocking=True)


def _wrapped(parts: _core.TensorParts, index: int) -> torch.Tensor:
    """A tensor around received bytes in host memory."""
    capsule, other_dtype = parts.take_tensor(index)
    if capsule is not None and other_dtype is None:
        return _from_dlpack(capsule)
    dtype, shape, strides, _, _ = parts.meta(index)
    if capsule is None:
        return torch.empty_strided(shape, strides, dtype=_DTYPES[dtype], device="cpu")
    # Not a view of the bytes: views of received tensors must find the tensor itself as their base.
    bytes_ = _from_dlpack(capsule).untyped_storage()
    return torch.empty(0, dtype=_DTYPES[dtype], device="cpu").set_(bytes_, 0, shape, strides)
