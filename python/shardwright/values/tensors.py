"""The bytes of tensors: copied from torch's memory when sent, wrapped without a copy when received."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from shardwright import _core
from shardwright.devices import accelerator, device_here
from shardwright.errors import UnsupportedValueError
from shardwright.frames.remote import bring_all

#: The dtypes with elements of whole bytes that this version of torch has.
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _core.DTYPES if hasattr(torch, name)}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}
_NOT_ELSEWHERE: Mapping[int, Any] = MappingProxyType({})


#: A tensor's dtype, shape, strides and device, and whether it requires a gradient.
Meta = tuple[str, list[int], list[int], str, bool]
#: A tensor that another rank holds: its metadata, the holding rank, the requester, the request, and its index in the
#: answer.
Origin = tuple[Meta, int, int, int, int]


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name, without ``torch.``, that tensors can be sent with."""
    return _DTYPES[name]


def pack(
    tensors: list[torch.Tensor], requires_grad: list[bool], origins: Mapping[int, Origin] = _NOT_ELSEWHERE
) -> _core.TensorParts:
    """Copy tensors into a message body.

    Dense tensors keep their strides; others are sent contiguous. Tensors on a GPU are copied in the order of the
    current stream, without waiting for the copy if the connection can detect its completion.

    Args:
        tensors: Any strided tensors.
        requires_grad: For each tensor, whether the receiver makes it require a gradient.
        origins: By index, the origins of tensors that the ranks holding them send to the receiver.

    Raises:
        UnsupportedValueError: A tensor is sparse, quantized, nested, on the meta device, or of a special subclass.
    """
    if not origins and (plain := _core.TensorParts.of_plain(tensors, requires_grad)) is not None:
        return plain
    parts = _core.TensorParts()
    here = [tensor for index, tensor in enumerate(tensors) if index not in origins] if origins else tensors
    # Check all tensors before the first copy.
    dense = iter([_dense(tensor) for tensor in bring_all(here)])
    for index, need in enumerate(requires_grad):
        if index in origins:
            (dtype, shape, strides, device_type, _), holder, requester, request, place = origins[index]
            held = {"holder": holder, "requester": requester, "request": request, "index": place}
            parts.append_held(dtype, shape, strides, device_type, need, **held)
        else:
            _append(parts, next(dense), need)
    return parts


def _append(parts: _core.TensorParts, tensor: torch.Tensor, requires_grad: bool) -> None:
    device_type = tensor.device.type
    if device_type == "cuda":
        if _append_device(parts, tensor, requires_grad):
            return
        tensor = _on_host(tensor)
    elif device_type != "cpu":
        tensor = tensor.detach().cpu()
    parts.append(tensor, _NAMES[tensor.dtype], device_type, requires_grad)


def _append_device(parts: _core.TensorParts, tensor: torch.Tensor, requires_grad: bool) -> bool:
    """Append a dense GPU tensor in the order of its current stream; return False if that is not possible."""
    stream = torch.cuda.current_stream(tensor.device)
    # The tensor may have been allocated on another stream.
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
    """Return whether the elements fill their memory without gaps or overlap, so that the strides can be sent."""
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
    """Return a tensor with the same values in dense memory, whose bytes can be read.

    Raises:
        UnsupportedValueError: No tensor of this kind can cross ranks, or it is on the meta device.
    """
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
    """Copy a dense GPU tensor to host memory, and wait for its current stream."""
    host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def unpack(parts: _core.TensorParts) -> list[torch.Tensor]:
    """Return the tensors of a received message body; each owns its memory alone, and none requires a gradient."""
    if accelerator() is None:
        return parts.take_tensors()
    return [unpack_one(parts, index) for index in range(len(parts))]


def unpack_one(parts: _core.TensorParts, index: int, device: torch.device | None = None) -> torch.Tensor:
    """Return one tensor of a received message body; each can be taken once.

    Args:
        parts: The body.
        index: The tensor's place in it.
        device: The device to put it on; by default this rank's device of the type that the sender had it on.
    """
    if accelerator() is None:
        return parts.take_tensor(index)
    device = device or device_here(parts.meta(index)[3])
    return parts.take_tensor(index) if device.type == "cpu" else _on_device(parts, index, device)


def _on_device(parts: _core.TensorParts, index: int, device: torch.device) -> torch.Tensor:
    """Create a tensor on a device from the received bytes of one on a device."""
    dtype, shape, strides, _, _ = parts.meta(index)
    tensor = torch.empty_strided(shape, strides, dtype=_DTYPES[dtype], device=device)
    if device.type != "cuda":
        return tensor.copy_(parts.take_tensor(index))
    stream = torch.cuda.current_stream(tensor.device)
    if parts.take_into_device(index, tensor.data_ptr(), ordinal=tensor.device.index, stream=stream.cuda_stream):
        return tensor
    return tensor.copy_(parts.take_tensor(index).pin_memory(), non_blocking=True)
