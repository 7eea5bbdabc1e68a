"""AdaLoRA over the ranks of a pipeline: the orthogonality of all layers in the loss, and one budget of ranks for all.

In one process, the model reads the weights of all layers for its loss, and its allocator their gradients. Here each
layer gives its part of the loss where it is, and the importance of all is gathered, so that all ranks find the same
threshold.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from shardwright.patches import original_of, replaced

_NAME = "orthogonality"


class Gathering(Protocol):
    """Where the adapters of a model are."""

    @property
    def is_divided(self) -> bool:
        """Whether the model is divided by now."""

    def gathered(self, operation: str, value: Any) -> list[Any]:
        """Return the value of each rank of the pipeline, all of which call this."""

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor stands for one of another rank."""


#: By allocator of a model that ranks divide: where its adapters are.
_allocators: weakref.WeakKeyDictionary[Any, Gathering] = weakref.WeakKeyDictionary()


def install(parts: Sequence[nn.Module], installed: ExitStack, adapters: Gathering) -> None:
    """Let AdaLoRA work on a model that the ranks of a pipeline divide, for as long as the job runs."""
    if (tuners := sys.modules.get("peft.tuners.adalora")) is None:
        return
    for tuner in (part for part in parts if isinstance(part, tuners.AdaLoraModel)):
        if (name := getattr(tuner, "trainable_adapter_name", None)) is None:
            continue
        _allocators[tuner.rankallocator] = adapters
        for layer in tuner.model.modules():
            if isinstance(layer, tuners.AdaLoraLayer):
                layer._modules[_NAME] = _Orthogonality(layer, name)
                installed.callback(layer._modules.pop, _NAME, None)
        installed.enter_context(replaced(tuners.AdaLoraModel, {"forward": _forward}))
        installed.enter_context(replaced(tuners.RankAllocator, _OF_ALLOCATORS))


class _Orthogonality(nn.Module):
    """How far the singular vectors of a layer are from being orthogonal; runs where they are."""

    def __init__(self, layer: nn.Module, adapter: str) -> None:
        super().__init__()
        self._layer, self._adapter = weakref.ref(layer), adapter

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self._layer()
        right, left = layer.lora_A[self._adapter], layer.lora_B[self._adapter]
        return _apart(right @ right.T), _apart(left.T @ left)


def _apart(covariance: torch.Tensor) -> torch.Tensor:
    identity = torch.eye(*covariance.size(), dtype=covariance.dtype, device=covariance.device)
    apart: torch.Tensor = torch.norm(covariance - identity, p="fro")
    return apart


def _forward(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``AdaLoraModel.forward``."""
    if tuner.__dict__.get("rankallocator") not in _allocators:
        return original_of(_forward)(tuner, *args, **kwargs)
    outputs = tuner.model.forward(*args, **kwargs)
    if isinstance(getattr(outputs, "loss", None), torch.Tensor):
        weight = tuner.peft_config[tuner.trainable_adapter_name].orth_reg_weight
        if weight < 0:
            raise ValueError("orth_reg_weight should be greater than or equal to 0. ")
        layers = [layer for layer in tuner.model.modules() if isinstance(layer._modules.get(_NAME), _Orthogonality)]
        terms = [term for layer in layers for term in layer._modules[_NAME]()]
        if terms:
            outputs.loss = outputs.loss + weight * (sum(terms) / len(terms))
    return outputs


class _Seen:
    """The parameters of a model, of which those of other ranks are left out, or stand-ins without meaning."""

    def __init__(self, model: nn.Module, adapters: Gathering, *, whole: bool) -> None:
        self._model, self._adapters, self._whole = model, adapters, whole

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            if not self._adapters.is_elsewhere(parameter):
                yield name, parameter
            elif self._whole:
                yield name, torch.zeros(parameter.shape, dtype=parameter.dtype)


def _update_ipt(allocator: Any, model: nn.Module) -> None:
    """Replace ``RankAllocator.update_ipt``: of what this rank has."""
    adapters = _allocators.get(allocator)
    seen = model if adapters is None or not adapters.is_divided else _Seen(model, adapters, whole=False)
    original_of(_update_ipt)(allocator, seen)


def _mask_to_budget(allocator: Any, model: nn.Module, budget: int) -> Any:
    """Replace ``RankAllocator.mask_to_budget``: the threshold is that of all layers."""
    adapters = _allocators.get(allocator)
    if adapters is None or not adapters.is_divided:
        return original_of(_mask_to_budget)(allocator, model, budget)
    own = (allocator.exp_avg_ipt, allocator.exp_avg_unc)
    try:
        every = adapters.gathered("update_and_allocate", [dict(one) for one in own])
        allocator.exp_avg_ipt, allocator.exp_avg_unc = (
            {name: value for of_rank in every for name, value in of_rank[place].items()} for place in (0, 1)
        )
        return original_of(_mask_to_budget)(allocator, _Seen(model, adapters, whole=True), budget)
    finally:
        allocator.exp_avg_ipt, allocator.exp_avg_unc = own


def _mask_using_rank_pattern(allocator: Any, model: nn.Module, rank_pattern: Any) -> None:
    """Replace ``RankAllocator.mask_using_rank_pattern``: what this rank has."""
    adapters = _allocators.get(allocator)
    seen = model if adapters is None or not adapters.is_divided else _Seen(model, adapters, whole=False)
    original_of(_mask_using_rank_pattern)(allocator, seen, rank_pattern)


_OF_ALLOCATORS = {
    "update_ipt": _update_ipt,
    "mask_to_budget": _mask_to_budget,
    "mask_using_rank_pattern": _mask_using_rank_pattern,
}
