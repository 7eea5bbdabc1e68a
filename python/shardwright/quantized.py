"""Weights of few bits, by bitsandbytes and torchao: which tensors one is made of, and what else a layer keeps of it.

A weight of bitsandbytes is a tensor of packed numbers, with scales of blocks beside it in attributes; one of torchao is
a tensor that has no memory itself, and holds others. What is done with all tensors of a model is done with these.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwright.errors import ShardwrightError

#: Attributes of weights of bitsandbytes, which code asks for on all ranks.
_PLAIN_ATTRIBUTES = (
    "blocksize",
    "compress_statistics",
    "quant_type",
    "quant_storage",
    "bnb_quantized",
    "has_fp16_weights",
)
#: What state dicts have of 8-bit layers beside their parameters.
_OF_8_BITS = ("SCB", "weight_format")
#: What a placeholder has of a tensor that is made of others.
_TEMPLATE = "_shardwright_template"
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
    """Return whether a tensor, or what a placeholder stands for, has memory of its own, and is not made of others."""
    return not _is_made_of_others(tensor) and _TEMPLATE not in vars(tensor)


def beside(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that belong to a weight beside what is packed in it, by names; nothing for other tensors.

    Those of a delayed weight are on the meta device.
    """
    if _is_made_of_others(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        found: dict[str, torch.Tensor] = {}
        for name in names:
            inner = getattr(tensor, name)
            found.update({f"{name}.{other}": one for other, one in beside(inner).items()})
            if has_memory(inner):
                found[name] = inner
        return found
    own = vars(tensor)
    if own.get("quant_state") is not None:
        return _of_state(own["quant_state"])
    layer = own["_shardwright_layer"]() if "_shardwright_layer" in own else None
    scale = own.get("SCB") if layer is None or own.get("SCB") is not None else layer.state.SCB
    return {} if scale is None else {"SCB": scale}


def _of_state(state: Any) -> dict[str, torch.Tensor]:
    if state is None:
        return {}
    found = {"absmax": state.absmax, "quant_map": state.code}
    if getattr(state, "state2", None) is not None:
        found |= {"nested_absmax": state.state2.absmax, "nested_offset": state.offset}
    return found


class Template(NamedTuple):
    """How a tensor is made of others, without them.

    Attributes:
        kind: Its class.
        context: What the class needs besides tensors.
        size: Its shape.
        stride: Its strides.
        inner: By name, how those are made that are made of others themselves; None for ordinary ones.
    """

    kind: Any
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    inner: dict[str, Template | None]

    @staticmethod
    def of(tensor: object) -> Template | None:
        """Return how a tensor, or one that a placeholder stands for, is made of others; None for other tensors."""
        if not isinstance(tensor, torch.Tensor):
            return None
        if not _is_made_of_others(tensor):
            found: Template | None = vars(tensor).get(_TEMPLATE)
            return found
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: Template.of(getattr(tensor, name)) for name in names}
        return Template(type(tensor), context, tensor.shape, tensor.stride(), inner)

    def apart(self, tensor: Any) -> dict[str, Any]:
        """Return the ordinary tensors that a tensor is made of, by name."""
        return {
            name: getattr(tensor, name) if how is None else how.apart(getattr(tensor, name))
            for name, how in self.inner.items()
        }

    def together(self, parts: Mapping[str, Any]) -> torch.Tensor:
        """Make a tensor of others."""
        inner = {name: parts[name] if how is None else how.together(parts[name]) for name, how in self.inner.items()}
        made: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return made

    def of_flat(self, tensors: Mapping[str, torch.Tensor], before: str) -> torch.Tensor:
        """Make a tensor of those that :func:`beside` names, with what stands before their names."""
        inner = {
            name: tensors[before + name] if how is None else how.of_flat(tensors, f"{before}{name}.")
            for name, how in self.inner.items()
        }
        made: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return made


def saved_scales(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what layers of bitsandbytes on this rank have in state dicts beside their parameters."""
    found: dict[str, torch.Tensor] = {}
    for path, layer in module.named_modules():
        if _is_layer(layer) and _kind(layer._parameters["weight"]):
            own: dict[str, torch.Tensor] = {}
            prefix = f"{path}.".lstrip(".")
            layer._save_to_state_dict(own, prefix, False)
            found.update({key: one for key, one in own.items() if key.removeprefix(prefix) not in layer._parameters})
    return found


def templates(module: nn.Module) -> dict[str, Template]:
    """Return how parameters that are made of other tensors are, by all names, on whatever rank they are."""
    found = ((name, Template.of(one)) for name, one in module.named_parameters(remove_duplicate=False))
    return {name: how for name, how in found if how is not None}


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
    yield from filter(_is_layer, module.modules())


def _is_layer(part: nn.Module) -> bool:
    return type(part).__module__.startswith("bitsandbytes.") and part._parameters.get("weight") is not None


def prepare(module: nn.Module) -> None:
    """Have layers keep their weights as they will in all steps.

    8-bit layers move them in their first forward, which a trace, or a step that is run again, would undo in part. 4-bit
    ones lay them out for some processors in an evaluation, with rounded scales, and have no gradients from then on.
    """
    for layer in layers(module):
        weight = layer._parameters["weight"]
        if vars(layer).get("support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
        if hasattr(layer, "init_8bit_state"):
            if _kind(weight) and getattr(weight, "CB", None) is not None:
                layer.init_8bit_state()
            weight._shardwright_layer = _Reference(layer)  # also if it has no values yet
    unpack(module)


@contextlib.contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """Run a block in which 8-bit layers whose weights are not made yet multiply by what has their shape.

    They would put the weight, and tensors without values, from one of their attributes into another.
    """
    found = [
        layer
        for layer in layers(module)
        if hasattr(layer, "init_8bit_state") and not _kind(layer.weight) and "forward" not in vars(layer)
    ]
    for layer in found:
        vars(layer)["forward"] = functools.partial(_multiplied, layer)
    try:
        yield
    finally:
        for layer in found:
            vars(layer).pop("forward", None)


def _multiplied(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, layer.weight.to(x.dtype), layer.bias)


def unpack(module: nn.Module) -> None:
    """Give weights that layers have laid out for the processor the layout that they are saved in."""
    for layer in layers(module):
        weight = layer._parameters["weight"]
        state = vars(weight).get("quant_state")
        if state is None or not getattr(state, "packing_format_for_cpu", False):
            continue
        functional: Any = sys.modules["bitsandbytes.functional"]
        scales = state.absmax.T.reshape(-1).to(torch.float32)
        weight.data, state = functional._convert_weight_packed_for_cpu_inverse(weight.data, state)
        if getattr(state, "state2", None) is None:
            state.absmax = scales


def split_scales(module: nn.Module, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a state dict into what torch loads, and what belongs to weights of few bits, on whatever rank they are."""
    made = templates(module)
    named = [(path, part) for path, part in module.named_modules() if _is_layer(part)]
    own = {f"{path}.{name}".lstrip(".") for path, part in named if hasattr(part, "state") for name in _OF_8_BITS}
    before = tuple(f"{path}.weight.".lstrip(".") for path, _ in named)
    scales = {
        key: value for key, value in state.items() if key in own or key in made or (before and key.startswith(before))
    }
    return {key: value for key, value in state.items() if key not in scales}, scales


def load_scales(module: nn.Module, scales: Mapping[str, Any]) -> None:
    """Load what :func:`split_scales` has found.

    Raises:
        ShardwrightError: A weight is quantized in another way, or not made yet.
    """
    for name, parameter in module.named_parameters() if scales else ():
        if name in scales and _is_made_of_others(parameter):
            values = beside(scales[name])
            with torch.no_grad():
                for own, tensor in beside(parameter).items():
                    tensor.copy_(values[own])
    for path, part in module.named_modules() if scales else ():
        weight = part._parameters.get("weight")
        if not _is_layer(part) or weight is None:
            continue
        prefix = f"{path}.".lstrip(".")
        for name, tensor in beside(weight).items():
            value = scales.get(f"{prefix}{name}" if name in _OF_8_BITS else f"{prefix}weight.{name}")
            if value is None and name == "nested_offset":
                value = _offset(scales, f"{prefix}weight.")
            if value is None:
                continue
            if tensor.is_meta or (name == "quant_map" and not torch.equal(value, tensor)):
                why = "is made in the first step" if tensor.is_meta else "is quantized in another way"
                raise ShardwrightError(f"'{prefix}weight' {why}, so that this state dict cannot be loaded into it")
            with torch.no_grad():
                tensor.copy_(value.reshape(tensor.shape))


def _offset(scales: Mapping[str, Any], before: str) -> torch.Tensor | None:
    """What a state dict says of the scales of scales besides tensors."""
    key = next((key for key in scales if key.startswith(f"{before}quant_state.bitsandbytes__")), None)
    if key is None:
        return None
    return torch.tensor(sys.modules["bitsandbytes.utils"].unpack_tensor_to_dict(scales[key])["nested_offset"])


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
    if (how := Template.of(weight)) is not None:
        placeholder.__dict__[_TEMPLATE] = how
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
