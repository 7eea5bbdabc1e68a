"""Distributed modules with the calls of ``transformers``, and what is said of each model's."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.caches import holds_cache
from shardwright.errors import ConfigError
from shardwright.nn.attention import DistributedAttentionLayer
from shardwright.nn.huggingface.weights import Table
from shardwright.nn.transformer import DistributedTransformerLayer
from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.registry import Entry, InitArguments
from shardwright.tensor_parallel.sharding import Origin
from shardwright.transformers_models import collector

#: For models whose positions are not limited by a table.
ANY_LENGTH = 1 << 31

#: Arguments of layers that normalize the input of each block only.
PRE_NORM = {"pre_layernorm": True, "post_layernorm": False}

#: Classes of activations, of ``transformers`` and torch, and their names here.
_ACTIVATIONS = {
    "AccurateGELUActivation": "gelu_new",
    "FastGELUActivation": "gelu_new",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_new",
    "NewGELUActivation": "gelu_new",
    "PytorchGELUTanh": "gelu_new",
    "QuickGELUActivation": "quick_gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}

#: Arguments of calls that say what a distributed layer cannot do, unless they are None or False.
_REFUSED = {
    "head_mask": "a mask of heads",
    "layer_head_mask": "a mask of heads",
    "output_attentions": "attention weights as output",
}


def activation(function: object) -> str:
    """The name here of an activation of ``transformers``; raise if there is none."""
    name = type(function).__name__
    if name not in _ACTIVATIONS:
        raise ConfigError(f"its activation is {name}; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def refuse(module: nn.Module, others: Mapping[str, object]) -> None:
    """Raise if arguments of a call that would be passed over ask for what a distributed layer cannot do."""
    if any("attentions" in name for name in collector.collected_names()):
        others = {**others, "output_attentions": True}
    for name, value in others.items():
        what, hint = _REFUSED.get(name), ""
        if holds_cache(value):  # whose argument has had several names
            what, hint = "a key/value cache", "; pass use_cache=False"
        if what is not None and value is not None and value is not False:
            raise ConfigError(f"{type(module).__name__}: the call has {name}, {what}, which it does not know{hint}")


def check_crossing(layer: DistributedTransformerLayer, encoder_hidden_states: torch.Tensor | None) -> None:
    """Raise if a call has another sequence to attend to and the layer has no cross-attention, or vice versa."""
    has = layer.cross_attention is not None
    if has != (encoder_hidden_states is not None):
        given = "None" if encoder_hidden_states is None else "a tensor"
        wanted = "a tensor, as the layer has cross-attention" if has else "None, as the layer has no cross-attention"
        raise ConfigError(f"{type(layer).__name__}: encoder_hidden_states is {given}; expected {wanted}")


def added_mask(
    mask: torch.Tensor | None, hidden: torch.Tensor, num_keys: int, causal: bool = False, window: int | None = None
) -> torch.Tensor:
    """A mask of ``transformers`` as one that is added to scores.

    There is one in any case: whether ``transformers`` makes one depends on the samples, which differ between ranks.

    Args:
        mask: None, or [N, K] with 0 for what is hidden, or [N or 1, 1 or heads, 1 or Q, K], boolean with False for what
            is hidden, or floating.
        hidden: [N, Q, channels], of the mask's dtype to be.
        num_keys: K.
        causal: Whether the layer hides what comes later by itself.
        window: How many positions the layer shows by itself.

    Returns:
        [N, 1, 1, K] where all that is hidden beyond what the layer hides by itself are keys; otherwise
        [N, 1 or heads, Q, K].

    Raises:
        ConfigError: It is none of these.
    """
    batch, length = hidden.shape[:2]
    if mask is None:
        return hidden.new_zeros(batch, 1, 1, num_keys)
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ConfigError(f"attention_mask is {shape}; allowed: tensors of 2 or 4 dims")
    if mask.dim() == 2:
        visible = mask.bool()[:, None, None, :]
    elif mask.dtype == torch.bool:
        visible = mask
    else:
        least = torch.finfo(mask.dtype).min / 2
        visible = mask > least
        if not ((mask == 0) | ~visible).all():  # a bias, no mask
            return mask.to(hidden.dtype).expand(batch, -1, -1, -1).contiguous()
    visible = visible[..., :num_keys]
    if visible.shape[-2] > 1 and visible.shape[1] == 1:
        keys = visible.any(-2, keepdim=True)
        at = torch.arange(length, device=mask.device).unsqueeze(1) - torch.arange(num_keys, device=mask.device)
        shown = torch.ones_like(at, dtype=torch.bool)
        if causal:
            shown = at >= 0
        if window is not None:
            shown = shown & (at < window)
        if torch.equal((keys & shown).expand_as(visible), visible):
            visible = keys
    lowest = torch.finfo(hidden.dtype).min
    additive = torch.zeros(visible.shape, dtype=hidden.dtype, device=hidden.device)
    return additive.masked_fill(~visible, lowest).expand(batch, -1, -1, -1).contiguous()


class TransformersLayer(DistributedTransformerLayer):
    """A transformer layer that is called as those of ``transformers`` are."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        *,
        position_bias: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Apply the layer; all ranks of the group call it together.

        Args:
            hidden_states: [batch, sequence, hidden_size].
            attention_mask: As for :func:`added_mask`.
            position_embeddings: Cosine and sine of rotary embeddings, [batch or 1, sequence, rotary_dim] each.
            encoder_hidden_states: [batch, sequence of the encoder, hidden_size], for cross-attention.
            encoder_attention_mask: As for :func:`added_mask`.
            position_bias: [batch or 1, heads, sequence, sequence], added to scores of self-attention.
            **others: What else such a layer is called with; of no effect.

        Returns:
            [batch, sequence, hidden_size].

        Raises:
            ConfigError: The call asks for what the layer cannot do, or as for ``DistributedTransformerLayer``.
        """
        refuse(self, others)
        check_crossing(self, encoder_hidden_states)
        cos, sin = position_embeddings or (None, None)
        own, length = self.attention, hidden_states.shape[1]
        mask = added_mask(attention_mask, hidden_states, length, own.causal_mask_size is not None, own.window_size)
        inputs: tuple[object, ...] = (hidden_states, mask, position_bias, cos, sin)
        if encoder_hidden_states is not None:
            cross_mask = added_mask(encoder_attention_mask, hidden_states, encoder_hidden_states.shape[1])
            inputs = (hidden_states, encoder_hidden_states, mask, cross_mask, position_bias, cos, sin)
        result: Any = super().forward(inputs)[0]
        return result  # type: ignore[no-any-return]


class TransformersAttention(DistributedAttentionLayer):
    """An attention block that is called as those of ``transformers`` are."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Apply the block; see :class:`TransformersLayer`."""
        refuse(self, others)
        mask = added_mask(
            attention_mask,
            hidden_states,
            hidden_states.shape[1],
            self.causal_mask_size is not None,
            self.window_size,
        )
        return super().forward((hidden_states, mask, None, *(position_embeddings or (None, None))))


@dataclass(frozen=True)
class Replaced:
    """A module of ``transformers`` that has a distributed implementation.

    Attributes:
        module: The name of the Python module that has its class.
        cls: The class.
        arguments: The keyword arguments of the distributed module, from the original. A :class:`ConfigError` says why
            there is none.
        table: Its weights; where modules of the class differ, by the original.
        dist_module: The distributed module.
        heads: The number of its heads, from the original, where the layout of its weights needs it.
        returns_all: Whether the distributed module returns all that the original does, and not hidden states alone.
    """

    module: str
    cls: str
    arguments: Callable[[Any], dict[str, Any]]
    table: Table | Callable[[Any], Table]
    dist_module: type[DistributedModule] = TransformersLayer
    heads: Callable[[Any], int] = lambda module: 0
    returns_all: bool = False

    def entry(self, cls: type[nn.Module]) -> Entry:
        """How modules of the class are replaced."""
        signature = inspect.signature(cls.forward)
        others = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

        def named(*args: Any, **kwargs: Any) -> InitArguments:
            arguments = dict(signature.bind(None, *args, **kwargs).arguments)
            del arguments[next(iter(signature.parameters))]
            return (), {**(arguments.pop(others, {}) if others else {}), **arguments}

        def arguments(module: nn.Module) -> InitArguments:
            try:
                return (), self.arguments(module)
            except AttributeError as error:
                raise ConfigError(f"this version of transformers builds it in another way: {error}") from error

        return Entry(
            self.dist_module,
            arguments,
            forward_hook=named,
            return_hook=_with_nothing if not self.returns_all and returns_tuple(cls) else None,
            weights_hook=self.weights_of,
            origins_hook=self.origins_of,
        )

    def weights_of(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """The original's weights by the names of the distributed module."""
        return self._table_of(module).weights_of(module, self.heads(module))

    def origins_of(self, module: nn.Module) -> dict[str, tuple[Origin, ...]]:
        """Of which of the original's weights each of the distributed module's is made."""
        return self._table_of(module).origins_of(module, self.heads(module))

    def _table_of(self, module: nn.Module) -> Table:
        return self.table if isinstance(self.table, Table) else self.table(module)


def _with_nothing(hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
    """As layers return hidden states and attention weights."""
    return hidden, None


def returns_tuple(cls: type[nn.Module]) -> bool:
    """Whether ``forward`` of a class returns a tuple, as its last statement says: that changed between versions."""
    function: Any = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward)))).body[0]
    returned = next(node.value for node in reversed(function.body) if isinstance(node, ast.Return))
    if not isinstance(returned, ast.Name):
        return _is_tuple(returned)
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return any(
        isinstance(target, ast.Name) and target.id == returned.id and _is_tuple(node.value)
        for node in assigned
        for target in node.targets
    )


def _is_tuple(node: ast.expr | None) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_tuple(node.left) or _is_tuple(node.right)
    return isinstance(node, ast.Tuple)
