"""Tensors' bytes: copied out of torch's memory when sent, wrapped without a copy when received."""

from __future__ import annotations

from collections.abc import Mapping
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
_NOT_ELSEWHERE: Mapping[int, Any] = MappingProxyType({})


#: A tensor that another rank holds: its dtype, shape, strides, device and whether it requires a gradient; that rank,
#: who asked for it, the request, and its place in the answer.
Origin = tuple[tuple[str, list[int], list[int], str, bool], int, int, int, int]


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a tensor that crosses ranks, by its name without ``torch.``."""
    return _DTYPES[name]


def pack(tensors: list[torch.Tensor], requires_grad: list[bool], origins: Mapping[int, Origin] = _NOT_ELSEWHERE) -> Any:
    """Copy tensors into a body.

    Dense tensors keep their strides; others are sent contiguous. Tensors on a GPU are staged through pinned host
    memory, in the order of the current stream.

    Args:
        tensors: Any strided tensors.
        requires_grad: For each whether the receiver shall make it require a gradient.
        origins: By index, those that go to the receiver from the rank that holds them.

    Returns:
        A ``_core.TensorParts``.

    Raises:
        UnsupportedValueError: A tensor is sparse, quantized, nested, on the meta device, or of a special subclass.
    """
    parts = _core.TensorParts()
    here = [tensor for index, tensor in enumerate(tensors) if index not in origins] if origins else tensors
    here = bring_all(here)
    staged = [(tensor, _on_host(tensor)) for tensor in here]
    devices = [tensor.device for tensor in here if tensor.is_cuda]
    for device in set(devices):
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()
    rest = iter(staged)
    for index, need in enumerate(requires_grad):
        if index in origins:
            (dtype, shape, strides, device_type, _), holder, requester, request, place = origins[index]
            held = {"holder": holder, "requester": requester, "request": request, "index": place}
            parts.append_held(dtype, shape, strides, device_type, need, **held)
            continue
        tensor, host = next(rest)
        parts.append(
            host.data_ptr(),
            host.nbytes,
            _NAMES[host.dtype],
            host.shape,
            host.stride(),
            tensor.device.type,
            need,
        )
    return parts


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


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in dense host memory, for reading its address."""
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        raise UnsupportedValueError(
            f"a tensor of the subclass {type(tensor).__qualname__} cannot cross ranks; convert it to a plain tensor"
        )
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in _NAMES:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise UnsupportedValueError(
            f"a {kind} tensor of dtype {tensor.dtype} on device {tensor.device} cannot cross ranks; only strided "
            "tensors with values of whole bytes can: convert it, for example by .to_dense() or .dequantize()"
        )
    plain = tensor
    if tensor.is_conj() or tensor.is_neg():
        plain = tensor.detach().resolve_conj().resolve_neg()
    if not is_dense(plain):
        plain = plain.detach().contiguous()
    if not plain.is_cuda:
        return plain
    plain = plain.detach()
    host = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device="cpu", pin_memory=True)
    return host.copy_(plain, non_blocking=True)


def unpack(parts: Any) -> list[torch.Tensor]:
    """Make the tensors of a received body, each the only owner of its memory; none requires a gradient."""
    return [unpack_one(parts, index) for index in range(len(parts))]


def unpack_one(parts: Any, index: int) -> torch.Tensor:
    """Make one tensor of a received body; each can be made once."""
    buffer, dtype, shape, strides, device = parts.take_tensor(index)
    if len(buffer):
        # In place: views of received tensors must find the tensor itself as their base.
        tensor = torch.frombuffer(buffer, dtype=_DTYPES[dtype]).as_strided_(shape, strides)
    else:
        tensor = torch.empty_strided(shape, strides, dtype=_DTYPES[dtype], device="cpu")
    if device == "cuda" and torch.cuda.is_available():
        tensor = tensor.pin_memory().to("cuda", non_blocking=True)
    return tensor
