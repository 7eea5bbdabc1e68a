"""The base of the attention and the output block of a transformer layer: normalizations, dropout and residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.nn.dropout import STREAMS_PER_LAYER, dropout, seed_of
from shardwright.nn.layer_norm import make_norm
from shardwright.nn.parallel_linear import ParallelLinear
from shardwright.tensor_parallel.layouts import FEATURES, WHOLE, Layout
from shardwright.tensor_parallel.module import DistributedModule, Placed


class BlockOptions(Placed, total=False):
    """Keyword arguments of both blocks beyond the paper's.

    Attributes:
        normalization: ``"layer_norm"`` (the default) or ``"rms_norm"``.
        residual: Whether the input is added to the output, by default True. Without it the block needs no
            normalization.
        layer_idx: The layer's index in the model, from 0; it makes the random numbers of layers different in a call.
        inside: Whether it is part of another distributed module, which has gathered the samples. Inputs are then a
            plain tuple of ``LayerInputs``, and outputs remain gathered.
    """

    normalization: str
    residual: bool
    layer_idx: int | None
    inside: bool


class Block(DistributedModule):
    """A block of a transformer layer between its input and the sum with it, with an optional normalization of each."""

    pre_layernorm: nn.Module | None
    layernorm: nn.Module | None

    def __init__(
        self,
        hidden_size: int,
        hidden_dropout_prob: float,
        layernorm_epsilon: float,
        pre_layernorm: bool,
        post_layernorm: bool,
        fp32_residual_addition: bool,
        first_stream: int,
        deviation: float | None,
        *,
        normalization: str = "layer_norm",
        residual: bool = True,
        layer_idx: int | None = None,
        inside: bool = False,
        **place: Unpack[Placed],
    ) -> None:
        """Create the parts before and after the linear layers; see the blocks and :class:`BlockOptions`.

        Weights are drawn from a normal distribution if there is a ``deviation``.
        """
        super().__init__(**place)
        if residual and not (pre_layernorm or post_layernorm):
            raise ConfigError(
                f"{type(self).__name__}: pre_layernorm and post_layernorm are both False; at least one has to be True"
            )
        self.hidden_size = hidden_size
        self.hidden_dropout_prob = self.checked_probability("hidden_dropout_prob", hidden_dropout_prob)
        self.fp32_residual_addition = fp32_residual_addition
        self.residual, self.inside = residual, inside
        self._deviation = deviation
        self._first_stream = (layer_idx or 0) * STREAMS_PER_LAYER + first_stream
        for name, wanted in (("pre_layernorm", pre_layernorm), ("layernorm", post_layernorm)):
            norm = make_norm(normalization, hidden_size, layernorm_epsilon, self.placed) if wanted else None
            self.register_module(name, norm)

    def make_linear(
        self, inputs: int, blocks: Sequence[int], bias: bool, input: Layout, output: Layout
    ) -> ParallelLinear:
        """Create a linear layer of the block between layouts for speed; for memory, channels are always divided."""
        if self.tp_group.optimize == "memory":
            input = output = FEATURES
        # If a gradient is summed elsewhere, nothing is sent; for memory, slices of blocks are sent in one collective.
        overlap = WHOLE in (input, output)
        return ParallelLinear(
            inputs,
            blocks,
            bias,
            input=input,
            output=output,
            overlap=overlap,
            inside=True,
            deviation=self._deviation,
            **self.placed,
        )

    def checked_probability(self, name: str, value: float) -> float:
        """Return a dropout probability; raise if it is none."""
        if not 0 <= value <= 1:
            raise ConfigError(f"{type(self).__name__}: {name} is {value}; allowed: 0 to 1")
        return value

    def seed_of(self, seed: int | None, probability: float, stream: int, divided: bool) -> int | None:
        """Return the seed of this block's dropout ``stream``, given that of the call; None if nothing is dropped.

        If the dropout's input is ``divided`` over tp ranks, each rank draws different numbers.
        """
        if seed is None or not self.training or probability == 0:
            return None
        return seed_of(seed, self._first_stream + stream, self.tp_group.rank if divided else None)

    def before(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normalized input of the first linear layers; for speed, they sum its gradient over ranks."""
        return hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)

    def after(self, hidden: torch.Tensor, output: torch.Tensor, seed: int | None, stream: int) -> torch.Tensor:
        """Return the block's result, given its input and the output of its last linear layer."""
        own = self.seed_of(seed, self.hidden_dropout_prob, stream, self.tp_group.optimize == "memory")
        if own is not None:
            output = dropout(output, self.hidden_dropout_prob, own)
        if self.residual and self.fp32_residual_addition:
            output = (hidden.float() + output.float()).to(output.dtype)
        elif self.residual:
            output = hidden + output
        return output if self.layernorm is None else self.layernorm(output)
