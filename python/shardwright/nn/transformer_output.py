"""The distributed output block of a transformer layer: its two linear layers (paper, figures 12 and 14)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.nn.block import Block, BlockOptions
from shardwright.nn.dropout import dropout
from shardwright.nn.gathered import LayerInputs, enter
from shardwright.nn.parallel_linear import apply_together
from shardwright.tensor_parallel.layouts import FEATURES, WHOLE

_STREAM = 4


def _gelu_new(input: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(input, approximate="tanh")


def _quick_gelu(input: torch.Tensor) -> torch.Tensor:
    return input * torch.sigmoid(1.702 * input)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": nn.functional.gelu,
    "gelu_new": _gelu_new,
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
    "quick_gelu": _quick_gelu,
}


class DistributedTransformerOutputLayer(Block):
    """The block of two linear layers with an activation between them (paper, appendix F).

    Attributes:
        pre_layernorm: The normalization of the input, or None.
        dense1: The linear layer to the intermediate channels.
        gate: For a gated block, a second such layer: the activation of its output multiplies the output of ``dense1``.
        dense2: The linear layer back to the hidden channels.
        layernorm: The normalization of the sum of input and output, or None.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        *,
        gated: bool = False,
        mlp_bias: bool = True,
        intermediate_dropout_prob: float = 0.0,
        **options: Unpack[BlockOptions],
    ) -> None:
        """Create a block with newly initialized weights. Sizes are those of the whole module.

        Args:
            intermediate_size: The number of channels between the linear layers. Other arguments not described here are
                those of :class:`DistributedAttentionLayer`.
            activation: ``"gelu"``, ``"gelu_new"`` (by tanh), ``"relu"``, ``"silu"`` or ``"quick_gelu"``.
            gated: Whether the activation of a second linear layer multiplies the first.
            mlp_bias: Whether the linear layers have biases.
            intermediate_dropout_prob: The dropout probability of the input of the last linear layer, in training.
            **options: Options of :class:`BlockOptions`.
        """
        super().__init__(
            hidden_size,
            hidden_dropout_prob,
            layernorm_epsilon,
            pre_layernorm,
            post_layernorm,
            fp32_residual_addition,
            _STREAM,
            initializer_range if use_normal_initialization else None,
            **options,
        )
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation is {activation!r}; allowed: {', '.join(map(repr, ACTIVATIONS))}")
        self.activation = activation
        self.intermediate_dropout_prob = self.checked_probability(
            "intermediate_dropout_prob", intermediate_dropout_prob
        )

        self.dense1 = self.make_linear(hidden_size, [intermediate_size], mlp_bias, WHOLE, FEATURES)
        self.gate = self.make_linear(hidden_size, [intermediate_size], mlp_bias, WHOLE, FEATURES) if gated else None
        self.dense2 = self.make_linear(intermediate_size, [hidden_size], mlp_bias, FEATURES, WHOLE)

    def forward(self, inputs: torch.Tensor | tuple[object, ...]) -> torch.Tensor:
        """Apply the block; all ranks of the group must call it together.

        Args:
            inputs: [batch, ..., hidden_size], floating; inside another distributed module, ``LayerInputs`` as a
                plain tuple.

        Returns:
            [batch, ..., hidden_size]; inside, gathered.
        """
        if isinstance(inputs, torch.Tensor):
            call = enter(self, LayerInputs(inputs), self.hidden_size, drops=self.training and self.drops)
            return call.leave(self._block(call.inputs))
        return self._block(LayerInputs(*inputs))  # type: ignore[arg-type]

    @property
    def drops(self) -> bool:
        """Whether a dropout has a probability above zero."""
        return self.hidden_dropout_prob > 0 or self.intermediate_dropout_prob > 0

    def _block(self, inputs: LayerInputs) -> torch.Tensor:
        input = self.before(inputs.hidden)
        function = ACTIVATIONS[self.activation]
        if self.gate is None:
            between = function(self.dense1(input))
        else:
            dense, gate = apply_together([self.dense1, self.gate], input)
            between = function(gate) * dense
        seed = self.seed_of(inputs.seed, self.intermediate_dropout_prob, 1, divided=True)
        if seed is not None:
            between = dropout(between, self.intermediate_dropout_prob, seed)
        output = self.dense2(between)
        return self.after(inputs.hidden, output, inputs.seed, 0)
