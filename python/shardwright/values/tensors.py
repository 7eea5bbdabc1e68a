"""Tensors' bytes: copied out of torch's memory when sent, wrapped without a copy when received."""

from __future__ import annotations

from typing import Any

import torch

from shardwright import _core
from shardwright.errors import UnsupportedValueError

_DTYPES: dict[str, torch.dtype] = {}
_NAMES: dict[torch.dtype, str] = {}
for _attribute in dir(torch):
    _value = getattr(torch, _attribute)
    if isinstance(_value, torch.dtype):
        _name = str(_value).removeprefix("torch.")
        _DTYPES[_name] = _value
        _NAMES[_value] = _name


def pack(tensors: list[torch.Tensor], requires_grad: list[bool]) -> Any:
    """Copy tensors into a body.

    Dense tensors keep their strides; others are sent contiguous. Tensors on a GPU are staged through pinned host
    memory, in the order of the current stream.

    Args:
        tensors: Any strided tensors.
        requires_grad: For each whether the receiver shall make it require a gradient.

    Returns:
        A ``_core.TensorParts``.

    Raises:
        UnsupportedValueError: A tensor is sparse, quantized, nested, on the meta device, or of a special subclass.
    """
    parts = _core.TensorParts()
    staged = [(tensor, _on_host(tensor)) for tensor in tensors]
    if any(tensor.is_cuda for tensor in tensors):
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    for (tensor, host), need in zip(staged, requires_grad, strict=True):
        parts.append(
            host.data_ptr(),
            host.numel() * host.element_size(),
            _NAMES[host.dtype],
            host.shape,
            host.stride(),
            tensor.device.type,
            need,
        )
    return parts


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in dense host memory, as a plain tensor without history."""
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        raise UnsupportedValueError(
            f"a tensor of the subclass {type(tensor).__qualname__} cannot cross ranks; convert it to a plain tensor"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise UnsupportedValueError(
            f"a tensor of shape {tuple(tensor.shape)}, layout {tensor.layout} and device {tensor.device} cannot cross "
            "ranks; only strided tensors with values can (use .to_dense() or .dequantize())"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous() and not torch._prims_common.is_non_overlapping_and_dense(plain):  # type: ignore[attr-defined]
        plain = plain.contiguous()
    if not plain.is_cuda:
        return plain
    host = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, pin_memory=True)
    return host.copy_(plain, non_blocking=True)


def unpack(parts: Any) -> list[torch.Tensor]:
    """Make the tensors of a received body, each the only owner of its memory; none requires a gradient."""
    tensors = []
    for index in range(len(parts)):
        dtype, shape, strides, device, _ = parts.meta(index)
        buffer = parts.buffer(index)
        tensor = torch.empty(0, dtype=_DTYPES[dtype])
        if len(buffer):
            # Not a view of the buffer's tensor: views of received tensors must find the tensor itself as their base.
            tensor.set_(torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage(), 0, shape, strides)
        else:
            tensor = torch.empty_strided(shape, strides, dtype=_DTYPES[dtype])
        if device == "cuda" and torch.cuda.is_available():
            tensor = tensor.pin_memory().to("cuda", non_blocking=True)
        tensors.append(tensor)
    return tensors
