"""Weights of few bits, by bitsandbytes and torchao: which tensors one is made of, and what else a layer keeps of it.

A weight of bitsandbytes is a tensor of packed numbers, with the scales of blocks beside it in attributes; one of torchao is
a tensor that has no memory itself, and holds others. What is done with all tensors of a model is done with these.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: Attributes of weights of bitsandbytes, which code asks for on all ranks.
_PLAIN_ATTRIBUTES = (
    "blocksize",
    "compress_statistics",
    "quant_type",
    "quant_storage",
    "bnb_quantized",
    "has_fp16_weights",
)
_HELD_ATTRIBUTES = ("quant_state", "module", "CB", "SCB")


def _kind(tensor: object) -> str:
    """The class of a weight of bitsandbytes; empty for other tensors."""
    name = type(tensor).__name__
    return name if type(tensor).__module__.startswith("bitsandbytes.") and name in ("Params4bit", "Int8Params") else ""


def is_quantized(tensor: object) -> bool:
    """Return whether a tensor is a weight of few bits that has its values."""
    return bool(_kind(tensor)) or _is_made_of_others(tensor)


def _is_made_of_others(tensor: object) -> bool:
    return (
        type(tensor).__module__.startswith("torchao.")
        and isinstance(tensor, torch.Tensor)
        and is_traceable_wrapper_subclass(tensor)
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own, and is not only made of others."""
    return not _is_made_of_others(tensor)


def beside(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that belong to a weight beside what is packed in it, by names; nothing for other tensors."""
    kind = _kind(tensor)
    if kind == "Params4bit":
        return _of_state(getattr(tensor, "quant_state", None))
    if kind == "Int8Params":
        scale = getattr(tensor, "SCB", None)
        if scale is None and (layer := getattr(tensor, "_shardwright_layer", None)) is not None:
            scale = layer().state.SCB if layer() is not None else None
        return {} if scale is None else {"SCB": scale}
    if _is_made_of_others(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        found: dict[str, torch.Tensor] = {}
        for name in names:
            inner = getattr(tensor, name)
            further = beside(inner)
            found.update({f"{name}.{other}": one for other, one in further.items()})
            if has_memory(inner):
                found[name] = inner
        return found
    return {}


def _of_state(state: Any) -> dict[str, torch.Tensor]:
    if state is None:
        return {}
    found = {"absmax": state.absmax, f"{state.quant_type}_map": state.code}
    if state.state2 is not None:
        found |= {"nested_absmax": state.state2.absmax, "nested_offset": state.offset}
    return found


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes, of whatever it is made."""
    own = tensor.numel() * tensor.element_size() if has_memory(tensor) else 0
    return own + sum(one.numel() * one.element_size() for one in beside(tensor).values())


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the ordinary tensors that a tensor is made of: itself, mostly."""
    return [*([tensor] if has_memory(tensor) else []), *beside(tensor).values()]


def layers(module: nn.Module) -> Iterator[Any]:
    """Return the layers of bitsandbytes in a module."""
    if "bitsandbytes" not in sys.modules:
        return
    for part in module.modules():
        if type(part).__module__.startswith("bitsandbytes.") and "weight" in part._parameters:
            yield part


def prepare(module: nn.Module) -> None:
    """Have layers keep their weights as they do from their first forward on: a trace would undo that in part."""
    for layer in layers(module):
        weight = layer._parameters["weight"]
        if hasattr(layer, "init_8bit_state"):
            if _kind(weight) and getattr(weight, "CB", None) is not None:
                layer.init_8bit_state()
            weight._shardwright_layer = _Reference(layer)  # also if it has no values yet


class _Reference:
    """Who has a weight, which does not keep it alive, and is not copied with it."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = weakref.ref(layer)

    def __call__(self) -> nn.Module | None:
        return self._layer()

    def __deepcopy__(self, memo: object) -> None:
        return None


def describe(weight: torch.Tensor, placeholder: torch.Tensor) -> None:
    """Give a placeholder the attributes of a weight that code asks for, without what they hold."""
    if not _kind(weight):
        return
    for name in _PLAIN_ATTRIBUTES:
        if name in vars(weight):
            setattr(placeholder, name, vars(weight)[name])
    for name in _HELD_ATTRIBUTES:
        setattr(placeholder, name, None)


def release(weight: Any, holders: Sequence[nn.Module]) -> bool:
    """Free a weight of bitsandbytes that another rank owns, and what its layers keep of it; False for other tensors."""
    if not _kind(weight):
        return False
    for holder in holders:
        for name, none in (("quant_state", None), ("CB", None), ("SCB", None)):
            if name in vars(holder):
                vars(holder)[name] = none
        state = vars(holder).get("state")
        if state is not None and hasattr(state, "CB"):
            state.CB = state.SCB = None
    for name in _HELD_ATTRIBUTES:
        if name in vars(weight):
            setattr(weight, name, None)
    weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
    return True


def move(weight: Any, device: torch.device) -> None:
    """Move what belongs to a weight of bitsandbytes to a device; the weight itself is there."""
    kind = _kind(weight)
    if kind == "Params4bit" and getattr(weight, "quant_state", None) is not None:
        weight.quant_state.to(device)
    elif kind == "Int8Params":
        layer = getattr(weight, "_shardwright_layer", None)
        state = None if layer is None or layer() is None else layer().state
        if state is not None and state.SCB is not None:
            state.CB, state.SCB = weight.data, state.SCB.to(device)
