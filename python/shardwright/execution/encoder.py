"""``nn.TransformerEncoder`` with layers on several ranks: the results of torch's nested-tensor path, without it.

In evaluation mode with a padding mask, torch may skip the padded positions (by means of a nested tensor) and fill them
with zeros at the end. Such nested tensors do not cross ranks, and torch creates none if the weights are stand-ins.
All other positions get the same values with the mask alone: the layers run with the mask, and zeros are filled in after
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

_run: Callable[..., torch.Tensor] = nn.TransformerEncoder.forward


def pad_with_zeros(encoder: nn.TransformerEncoder) -> None:
    """Make an encoder with layers on other ranks return zeros at padded positions whenever torch does."""
    if type(encoder).forward is not _run:
        return

    @functools.wraps(_run)
    def forward(
        own: nn.TransformerEncoder,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        args = (src, mask, src_key_padding_mask, is_causal)
        if src_key_padding_mask is None or own.layers[0].training or not getattr(own, "use_nested_tensor", False):
            return _run(own, *args)
        output: torch.Tensor = _run(SimpleNamespace(layers=own.layers, norm=None, use_nested_tensor=False), *args)
        if _leaves_padding_out(own, args):
            output = output.masked_fill((src_key_padding_mask != 0).unsqueeze(-1), 0.0)
        return output if own.norm is None else own.norm(output)

    encoder.forward = MethodType(forward, encoder)  # type: ignore[method-assign]


def _leaves_padding_out(encoder: nn.TransformerEncoder, args: tuple[Any, ...]) -> bool:
    """Return whether torch, which decides by the first layer, would run the layers on a nested tensor."""
    first = _Described(encoder.layers[0])
    given = {"use_nested_tensor": True, "mask_check": getattr(encoder, "mask_check", True)}
    _run(SimpleNamespace(layers=[first], norm=None, **given), *args)
    return first.saw_nested


class _Described:
    """A layer with plain tensors in place of its weights, which records whether its input is a nested tensor."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.saw_nested = False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, torch.Tensor):
            return torch.empty(0, requires_grad=value.requires_grad)
        return _Described(value) if isinstance(value, nn.Module) else value

    def __call__(self, src: torch.Tensor, **_: Any) -> torch.Tensor:
        self.saw_nested = src.is_nested
        return src
