"""Mixtral: its attention is divided, and its experts are spread over tp ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.nn.gathered import check_shapes
from shardwright.nn.huggingface import llama
from shardwright.nn.huggingface.layer import Replaced, TransformersAttention, activation
from shardwright.nn.huggingface.weights import Table, Weight
from shardwright.nn.transformer_output import ACTIVATIONS
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.layouts import PARTIAL, SHARED, relayout, samples
from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.sharding import Sharding


class DistributedExperts(DistributedModule):
    """Gated feed-forward networks of which each token goes to some; the i-th tp rank has the i-th slice of them.

    Tokens of all ranks and their choices go to all ranks in one all-gather, each rank computes what its experts make of
    the tokens that chose them, and one reduce-scatter sums that and gives each token back. No token is dropped. Where
    all ranks bring the same tokens (``prescaled_batch``), one all-reduce forward and one backward are all.

    Attributes:
        gate_up_proj: [experts / tp degree, 2 * intermediate_size, hidden_size]; first the half that is activated.
        down_proj: [experts / tp degree, hidden_size, intermediate_size].
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        initializer_range: float = 0.02,
        *,
        group: TensorGroup | None = None,
    ) -> None:
        """Make experts with fresh, normal weights; sizes and numbers are those of all ranks."""
        super().__init__(group)
        self.num_experts, self.hidden_size, self.activation = num_experts, hidden_size, activation
        draw = functools.partial(nn.init.normal_, std=initializer_range)
        for name, shape in (
            ("gate_up_proj", (num_experts, 2 * intermediate_size, hidden_size)),
            ("down_proj", (num_experts, hidden_size, intermediate_size)),
        ):
            self.make_parameter(name, shape, Sharding(dim=0), draw)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Apply to each token the experts that it chose; all ranks of the group call it together.

        Args:
            hidden_states: [tokens, hidden_size]; numbers of tokens may differ between ranks, and be 0.
            top_k_index: [tokens, k], integer: the experts of each token.
            top_k_weights: [tokens, k]: what their results are multiplied by.

        Returns:
            [tokens, hidden_size]: for each token the weighted sum of its experts' results.
        """
        group = self.tp_group
        agreement = self.agree([hidden_states, top_k_index, top_k_weights], free_dim=samples(group).dim)
        for rank, signature in enumerate(agreement.signatures):
            shapes = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), signature.shapes, strict=True))
            tokens = shapes["hidden_states"][:1]
            needed = {
                "hidden_states": (None, (self.hidden_size,)),
                "top_k_index": (tokens, None),
                "top_k_weights": (tokens, shapes["top_k_index"][1:2]),
            }
            check_shapes(type(self).__name__, rank, shapes, needed)
        if top_k_index.is_floating_point():
            raise ConfigError(f"{self.operation}: top_k_index is {top_k_index.dtype}; expected integers")
        given, lies, sizes = [hidden_states, top_k_index, top_k_weights], samples(group), agreement.sizes(0)
        given = relayout(given, lies, SHARED, group=group, needs_grad=agreement.needs_grad, sizes=sizes)
        needs_grad = agreement.needs_grad or agreement.parameters_need_grad
        return relayout(self._results(*given), PARTIAL, lies, group=group, needs_grad=needs_grad, sizes=sizes)

    def _results(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sums over this rank's experts."""
        function, total = ACTIVATIONS[self.activation], torch.zeros_like(hidden)
        first = self.tp_group.rank * len(self.down_proj)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True), first):
            token, place = (index == expert).nonzero(as_tuple=True)
            gate, up = nn.functional.linear(hidden[token], gate_up).chunk(2, -1)
            result = nn.functional.linear(function(gate) * up, down) * weights[token, place, None]
            total = total.index_add(0, token, result.to(total.dtype))
        return total


def _attention_arguments(module: Any) -> dict[str, Any]:
    return {
        **llama.attention_arguments(module),
        "window_size": getattr(module.config, "sliding_window", None),
        "pre_layernorm": False,
        "post_layernorm": False,
        "residual": False,
    }


def _experts_arguments(module: Any) -> dict[str, Any]:
    return {
        "num_experts": module.num_experts,
        "hidden_size": module.hidden_dim,
        "intermediate_size": module.intermediate_dim,
        "activation": activation(module.act_fn),
    }


_MODULE = "transformers.models.mixtral.modeling_mixtral"
_TABLE = Table(llama.attention_weights("", ""), path=r"(^|\.)self_attn\.")

BLOCK = Replaced(_MODULE, "MixtralAttention", _attention_arguments, _TABLE, TransformersAttention)
EXPERTS = Replaced(
    _MODULE,
    "MixtralExperts",
    _experts_arguments,
    Table(tuple(Weight(name, (name,)) for name in ("gate_up_proj", "down_proj"))),
    DistributedExperts,
    returns_all=True,
)

translate_state_dict_to_hf_mixtral = _TABLE.to_transformers
translate_hf_state_dict_to_smdistributed_mixtral = _TABLE.to_distributed
