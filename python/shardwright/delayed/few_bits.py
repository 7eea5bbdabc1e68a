"""Weights of few bits that ``from_pretrained`` makes while it loads: delayed, the ranks that own them make them.

Until then a weight has the shape and the attributes that it will have, with scales on the meta device.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from shardwright.delayed.operations import heap
from shardwright.delayed.shapes import ShapeTensor
from shardwright.delayed.tensor import DelayedTensor, noted, real
from shardwright.patches import original_of, replaced

_BITSANDBYTES = "transformers.integrations.bitsandbytes"
#: How much memory is used for a while for each byte of a weight that is quantized.
_SCRATCH = 8
#: How many elements are quantized at once: more would take that much of more.
_ELEMENTS = 1 << 19


def install_conversions(stack: contextlib.ExitStack) -> None:
    """Delay what makes weights of few bits of those of files, as long as the stack is open."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    module: Any = importlib.import_module(_BITSANDBYTES)
    for name, convert in _CONVERSIONS.items():
        if (kind := getattr(module, name, None)) is not None:
            stack.enter_context(replaced(kind, {"convert": convert}))


@dataclass(eq=False)
class _Making:
    """Makes a weight of tensors.

    Attributes:
        make: Makes it, of tensors with values or on the meta device.
        about: What else it is given.
    """

    make: Callable[..., nn.Parameter]
    about: Mapping[str, Any]

    def __call__(self, *tensors: torch.Tensor) -> nn.Parameter:
        made = self.make(*tensors, **self.about)
        heap.count(_SCRATCH * sum(tensor.nbytes for tensor in tensors if not tensor.is_meta))
        return made

    def __str__(self) -> str:
        return self.make.__name__

    def delayed(self, inputs: Sequence[Any]) -> DelayedTensor:
        """Return the weight, which will be made of these."""
        with _disable_current_modes():
            _know_codes()
            made = self(*(one.meta if isinstance(one, DelayedTensor) else one for one in inputs))
        weight = noted(self, inputs, made.data)
        weight.__dict__.update({name: _without_values(one) for name, one in vars(made).items()})
        weight._is_param = True
        return weight


def _without_values(attribute: Any) -> Any:
    """Return what a layer finds beside its weight, and may put into its place, while a trace has no values."""
    return ShapeTensor(attribute, torch.device("cpu")) if isinstance(attribute, torch.Tensor) else attribute


def _know_codes() -> None:
    """Have bitsandbytes make the table of scales now, which would else be one without values, for good."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    functional.quantize_blockwise(torch.zeros(1))


def _values(input_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}


def _are_delayed(values: Mapping[str, Any]) -> bool:
    return any(isinstance(value, DelayedTensor) for value in values.values())


def _layer_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _transposed(layer: Any, value: torch.Tensor) -> torch.Tensor:
    """Return a weight as linear layers have it."""
    from transformers.pytorch_utils import Conv1D

    return value.T.contiguous() if issubclass(layer.source_cls, Conv1D) else value


def _quantize(kind: Callable[..., _Making]) -> Callable[..., Any]:
    """Return a replacement of a conversion of whole weights."""

    def convert(operation: Any, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        given, model = _values(input_dict), kwargs["model"]
        if not _are_delayed(given):
            result: dict[str, Any] = original_of(convert)(operation, input_dict, **kwargs)
            return result
        made: dict[str, Any] = {}
        for name, value in given.items():
            layer = _layer_of(model, name)
            before = model.get_parameter_or_buffer(name)
            made[name] = kind(vars(before)).delayed([_transposed(layer, value)])
            layer._is_hf_initialized = True  # type: ignore[assignment]
        return made

    return convert


def _of_4_bits(before: Mapping[str, Any]) -> _Making:
    return _Making(_make_4_bits, {"attributes": {**before}})


def _make_4_bits(value: torch.Tensor, *, attributes: Mapping[str, Any]) -> nn.Parameter:
    kinds: Any = importlib.import_module("bitsandbytes.nn")
    known = {name: one for name, one in attributes.items() if not name.startswith("_")}
    if value.is_meta or value.numel() <= _ELEMENTS or _ELEMENTS % (2 * known["blocksize"]):
        made: nn.Parameter = kinds.Params4bit(value, requires_grad=False, **known)._quantize(value.device)
        return made
    packed, state = _quantized_in_parts(value, known)
    known |= {"quant_state": state, "bnb_quantized": True}
    if (layer := known.get("module")) is not None:
        layer.quant_state = state
    whole: nn.Parameter = kinds.Params4bit(packed, requires_grad=False, **known)
    return whole


def _quantized_in_parts(value: torch.Tensor, known: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
    """Quantize a weight part by part, as its blocks are independent: the same numbers, with less memory meanwhile."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    options = {name: known[name] for name in ("blocksize", "quant_type", "quant_storage")}
    flat, packed, scales, state = value.contiguous().reshape(-1), [], [], None
    for part in torch.split(flat, _ELEMENTS):
        few, state = functional.quantize_4bit(part, compress_statistics=False, **options)
        packed.append(few)
        scales.append(state.absmax)
    assert state is not None, "a weight has elements"
    state.absmax, state.shape = torch.cat(scales), value.shape
    if known["compress_statistics"]:
        state.offset = state.absmax.mean()
        state.absmax, state.state2 = functional.quantize_blockwise(state.absmax - state.offset, blocksize=256)
        state.nested = True
    return torch.cat(packed), state


def _of_8_bits(before: Mapping[str, Any]) -> _Making:
    return _Making(_make_8_bits, {"has_fp16_weights": before["has_fp16_weights"]})


def _make_8_bits(value: torch.Tensor, *, has_fp16_weights: bool) -> nn.Parameter:
    kinds: Any = importlib.import_module("bitsandbytes.nn")
    made: nn.Parameter = kinds.Int8Params(value, requires_grad=False, has_fp16_weights=has_fp16_weights)._quantize(
        value.device
    )
    return made


def _deserialize_4_bits(operation: Any, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Replace the conversion of what was saved in 4 bits."""
    given = _values(input_dict)
    if len(given) == 1 or not _are_delayed(given):
        result: dict[str, Any] = original_of(_deserialize_4_bits)(operation, input_dict, **kwargs)
        return result
    layer = _layer_of(kwargs["model"], kwargs["full_layer_name"])
    names = [name for name in given if name != "weight"]
    # What describes the rest is small, and the shape depends on it.
    inputs = [real(given[name]) if ".bitsandbytes__" in name else given[name] for name in names]
    making = _Making(_make_saved_4_bits, {"names": tuple(names), "layer": layer})
    layer._is_hf_initialized = True  # type: ignore[assignment]
    return {"weight": making.delayed([given["weight"], *inputs])}


def _make_saved_4_bits(
    weight: torch.Tensor, *scales: torch.Tensor, names: Sequence[str], layer: nn.Module
) -> nn.Parameter:
    kinds: Any = importlib.import_module("bitsandbytes.nn")
    stats = dict(zip(names, scales, strict=True))
    made: nn.Parameter = kinds.Params4bit.from_prequantized(
        data=weight, quantized_stats=stats, requires_grad=False, device=weight.device, module=layer
    )
    return made


def _deserialize_8_bits(operation: Any, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Replace the conversion of what was saved in 8 bits."""
    given = _values(input_dict)
    if len(given) == 1 or not _are_delayed(given):
        result: dict[str, Any] = original_of(_deserialize_8_bits)(operation, input_dict, **kwargs)
        return result
    layer = _layer_of(kwargs["model"], kwargs["full_layer_name"])
    layer._is_hf_initialized = True  # type: ignore[assignment]
    return {"weight": _Making(_make_saved_8_bits, {}).delayed([given["weight"], given["SCB"]])}


def _make_saved_8_bits(weight: torch.Tensor, scale: torch.Tensor) -> nn.Parameter:
    kinds: Any = importlib.import_module("bitsandbytes.nn")
    made: nn.Parameter = kinds.Int8Params(weight, requires_grad=False, CB=weight, SCB=scale)
    return made


_CONVERSIONS = {
    "Bnb4bitQuantize": _quantize(_of_4_bits),
    "Bnb8bitQuantize": _quantize(_of_8_bits),
    "Bnb4bitDeserialize": _deserialize_4_bits,
    "Bnb8bitDeserialize": _deserialize_8_bits,
}
