"""The distributed transformer layer, and a sequence of them (paper, section 5.3 and appendix F)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.nn.attention import OF_SELF_ATTENTION, AttentionOptions, DistributedAttentionLayer, named_inputs
from shardwright.nn.gathered import LayerInputs, enter
from shardwright.nn.layer_norm import DistributedLayerNorm, make_norm
from shardwright.nn.transformer_output import DistributedTransformerOutputLayer
from shardwright.tensor_parallel.module import DistributedModule

_OF_CROSS_ATTENTION = ("hidden", "cross_states", "mask", "cross_mask", *OF_SELF_ATTENTION[2:])
_OF_OUTPUT_ONLY = ("gated", "mlp_bias", "intermediate_dropout_prob")
_OF_BOTH = ("normalization", "fp32_residual_addition", "layer_idx", "group", "device", "dtype")


class LayerOptions(AttentionOptions, total=False):
    """Keyword arguments of layers beyond the paper's, in addition to those of the two blocks.

    Attributes:
        parallel_residual: Whether both blocks take the layer's input, and the output is the sum of the input and both
            blocks, instead of one block after the other. It requires normalization of the input only, and no
            cross-attention.
        shared_layernorm: With ``parallel_residual``, whether both blocks use one normalization, ``pre_layernorm`` of
            the layer; by default each has its own.
    """

    fp32_residual_addition: bool
    gated: bool
    mlp_bias: bool
    intermediate_dropout_prob: float
    parallel_residual: bool
    shared_layernorm: bool


class TransformerOptions(LayerOptions, total=False):
    """Keyword arguments of a sequence of layers, in addition to those of layers.

    Attributes:
        window_sizes: ``window_size`` of each layer, if they differ.
        final_layernorm: Whether the output of the last layer is normalized; by default if both input and sum of each
            block are.
    """

    window_sizes: Sequence[int | None] | None
    final_layernorm: bool


class _OfLayers(DistributedModule):
    """The common base of a layer and a sequence of layers: inputs and outputs.

    Attributes:
        drops: Whether a dropout has a probability above zero.
    """

    drops: bool

    def __init__(
        self, hidden_size: int, num_attention_heads: int, add_cross_attention: bool, options: LayerOptions
    ) -> None:
        super().__init__(options.get("group"), device=options.get("device"), dtype=options.get("dtype"))
        self.inside = options.get("inside", False)
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.add_cross_attention = add_cross_attention
        self._normalization = options.get("normalization", "layer_norm")

    def _norm(self, epsilon: float) -> DistributedLayerNorm:
        return make_norm(self._normalization, self.hidden_size, epsilon, self.placed)

    def forward(self, inputs: tuple[object, ...]) -> tuple[object, ...]:
        """Compute; all ranks of the group must call it together.

        Args:
            inputs: (hidden, mask, position_bias, cos, sin), or with cross-attention (hidden, cross_states, mask,
                cross_mask, position_bias, cos, sin), with the shapes of ``LayerInputs``; what is missing or None after
                hidden and cross states is not applied. Inside another distributed module, ``LayerInputs`` as a
                plain tuple.

        Returns:
            The same tuple with the output in place of the hidden states.
        """
        if self.inside:
            return (self._computed(LayerInputs(*inputs)), *inputs[1:])  # type: ignore[arg-type]
        names = _OF_CROSS_ATTENTION if self.add_cross_attention else OF_SELF_ATTENTION
        given = named_inputs(type(self).__name__, inputs, names)
        call = enter(self, given, self.hidden_size, self.num_attention_heads, drops=self.training and self.drops)
        return (call.leave(self._computed(call.inputs)), *inputs[1:])

    def _computed(self, inputs: LayerInputs) -> torch.Tensor:
        """Return the output, given the gathered inputs."""
        raise NotImplementedError


class DistributedTransformerLayer(_OfLayers):
    """A transformer layer: attention, attention to cross states if there are any, and the output block.

    Attributes:
        attention: The first block.
        cross_attention: The block of attention to cross states, or None.
        output: The last block.
        pre_layernorm: With ``shared_layernorm``, the normalization of the input for both blocks; otherwise None.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        """Create a layer with newly initialized weights. Sizes are those of the whole module.

        Args:
            num_attention_heads: See :class:`DistributedAttentionLayer`, or :class:`DistributedTransformerOutputLayer`,
                also for arguments not described here.
            hidden_dropout_prob: The dropout probability of each block's output, in training.
            layernorm_epsilon: The epsilon of all normalizations.
            add_cross_attention: Whether there is a block of attention to cross states.
            pre_layernorm: Whether each block's input is normalized.
            post_layernorm: Whether each block's sum of input and output is normalized.
            **options: Options of :class:`LayerOptions`; ``use_alibi`` and ``alibi_bias_max`` among them.
        """
        super().__init__(hidden_size, num_attention_heads, add_cross_attention, options)
        given: dict[str, Any] = {**options, "group": self.tp_group}
        given.pop("inside", None)
        self.parallel_residual = parallel_residual = given.pop("parallel_residual", False)
        shared_layernorm = given.pop("shared_layernorm", False)
        if parallel_residual or shared_layernorm:
            _check_parallel(parallel_residual, pre_layernorm, post_layernorm, add_cross_attention)
        common = {
            "hidden_size": hidden_size,
            "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "pre_layernorm": pre_layernorm and not shared_layernorm,
            "post_layernorm": post_layernorm,
            "residual": not parallel_residual,
            "inside": True,
        }
        attention: dict[str, Any] = {
            **common,
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob,
            **{name: value for name, value in given.items() if name not in _OF_OUTPUT_ONLY},
        }
        output = {name: given[name] for name in (*_OF_BOTH, *_OF_OUTPUT_ONLY) if name in given}
        self.attention = DistributedAttentionLayer(causal_mask_size=causal_mask_size, **attention)
        self.cross_attention = (
            DistributedAttentionLayer(cross_attention=True, **attention) if add_cross_attention else None
        )
        self.output = DistributedTransformerOutputLayer(
            intermediate_size=intermediate_size, activation=activation, **{**common, **output}
        )
        self.drops = self.attention.drops or self.output.drops
        self.pre_layernorm = self._norm(layernorm_epsilon) if shared_layernorm else None

    def _computed(self, inputs: LayerInputs) -> torch.Tensor:
        hidden = inputs.hidden
        if self.parallel_residual:
            norm = self.pre_layernorm
            taken = tuple(inputs if norm is None else inputs._replace(hidden=norm(hidden)))
            result: torch.Tensor = hidden + self.attention(taken) + self.output(taken)
            return result
        inputs = inputs._replace(hidden=self.attention(tuple(inputs)))
        if self.cross_attention is not None:
            inputs = inputs._replace(hidden=self.cross_attention(tuple(inputs)))
        result = self.output(tuple(inputs))
        return result


class DistributedTransformer(_OfLayers):
    """A sequence of transformer layers: samples are gathered at its beginning, and returned to their ranks at its end.

    Attributes:
        seq_layers: The layers, which take and return gathered inputs as a plain tuple of ``LayerInputs``.
        pre_layernorm: The normalization of the input, if layers normalize both input and sum of each block; otherwise
            None.
        layernorm: The normalization of the output, under the same condition or as ``final_layernorm`` specifies.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Unpack[TransformerOptions],
    ) -> None:
        """Create the layers with newly initialized weights; arguments are those of a layer, and those below.

        Args:
            num_layers: The number of layers.
            pre_layernorm: As for each layer. With ``post_layernorm`` too, the transformer's input and output are
                normalized as well.
            **options: Options of :class:`TransformerOptions`; a ``layer_idx`` is that of the first layer.
        """
        super().__init__(hidden_size, num_attention_heads, add_cross_attention, options)
        if num_layers < 1:
            raise ConfigError(f"num_layers is {num_layers}; allowed: 1 or more")
        given: dict[str, Any] = {**options, "group": self.tp_group}
        window_sizes = given.pop("window_sizes", None)
        if window_sizes is not None and len(window_sizes) != num_layers:
            raise ConfigError(f"window_sizes are {list(window_sizes)}; expected one for each of {num_layers} layers")
        probabilities = attention_dropout_prob, hidden_dropout_prob, options.get("intermediate_dropout_prob", 0.0)
        self.drops = any(one > 0 for one in probabilities)
        given.pop("inside", None)
        first = given.pop("layer_idx", None) or 0
        both = pre_layernorm and post_layernorm
        self.pre_layernorm = self._norm(layernorm_epsilon) if both else None
        normalizes_output = given.pop("final_layernorm", both)
        self.layernorm = self._norm(layernorm_epsilon) if normalizes_output else None
        layers = []
        of_heads, sizes = (num_attention_heads, attention_head_size), (hidden_size, intermediate_size)
        dropouts, norms = (attention_dropout_prob, hidden_dropout_prob), (pre_layernorm, post_layernorm)
        weights, attention = (initializer_range, use_normal_initialization), (causal_mask_size, add_cross_attention)
        of_all = (*of_heads, *sizes, *dropouts, activation, layernorm_epsilon, *weights, *attention, *norms)
        for number in range(num_layers):
            if window_sizes is not None:
                given["window_size"] = window_sizes[number]
            own = {**given, "inside": True, "layer_idx": first + number}
            layers.append(DistributedTransformerLayer(*of_all, **own))
        self.seq_layers = nn.Sequential(*layers)

    def _computed(self, taken: LayerInputs) -> torch.Tensor:
        if self.pre_layernorm is not None:
            taken = taken._replace(hidden=self.pre_layernorm(taken.hidden))
        hidden: torch.Tensor = self.seq_layers(tuple(taken))[0]
        return hidden if self.layernorm is None else self.layernorm(hidden)


def _check_parallel(
    parallel_residual: bool, pre_layernorm: bool, post_layernorm: bool, add_cross_attention: bool
) -> None:
    if not parallel_residual:
        raise ConfigError("shared_layernorm is True and parallel_residual False; allowed: both or neither")
    if post_layernorm or add_cross_attention or not pre_layernorm:
        raise ConfigError(
            f"parallel_residual is True with pre_layernorm={pre_layernorm}, post_layernorm={post_layernorm}, "
            f"add_cross_attention={add_cross_attention}; allowed: True, False, False"
        )
