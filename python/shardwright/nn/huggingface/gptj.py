"""GPT-J: ``GPTJBlock`` is a transformer layer whose blocks run side by side, with rotary embeddings of its own."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.errors import ConfigError
from shardwright.nn.huggingface.layer import PRE_NORM, Replaced, TransformersLayer, activation
from shardwright.nn.huggingface.weights import Table, linear


class _RotaryLayer(TransformersLayer):
    """A layer that makes its rotary embeddings of positions."""

    def __init__(self, *, rotary_dim: int, **options: Any) -> None:
        """Make a layer that turns ``rotary_dim`` channels of each head; other options are those of its base."""
        super().__init__(**options)
        self.rotary_dim = rotary_dim

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        *,
        position_ids: torch.Tensor,
        position_embeddings: object = None,
        **others: Any,
    ) -> torch.Tensor:
        """Apply the layer; see ``TransformersLayer``. Positions are [batch or 1, sequence].

        Newer ``transformers`` also pass ``position_embeddings`` of the same positions, which have no effect.
        """
        even = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64, device=position_ids.device)
        frequencies = 1.0 / (10000 ** (even / self.rotary_dim))
        angles = (position_ids.unsqueeze(-1).float() * frequencies).repeat_interleave(2, -1)
        embeddings = (angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype))
        return super().forward(hidden_states, position_embeddings=embeddings, **others)


def _arguments(module: Any) -> dict[str, Any]:
    attention, config = module.attn, module.attn.config
    dropout = getattr(attention, "attn_dropout", None)  # of transformers before 5.24
    if attention.rotary_dim is None:
        raise ConfigError("its rotary_dim is None; supported: numbers of channels")
    return {
        "num_attention_heads": attention.num_attention_heads,
        "attention_head_size": attention.head_dim,
        "hidden_size": attention.embed_dim,
        "intermediate_size": module.mlp.fc_in.out_features,
        "attention_dropout_prob": attention.attention_dropout if dropout is None else dropout.p,
        "hidden_dropout_prob": attention.resid_dropout.p,
        "activation": activation(module.mlp.act),
        "layernorm_epsilon": module.ln_1.eps,
        "causal_mask_size": config.max_position_embeddings,
        "query_key_value_bias": False,
        "dense_bias": False,
        "rotary_dim": attention.rotary_dim,
        "rotary_interleaved": True,
        "attention_in_fp32": True,
        "parallel_residual": True,
        "shared_layernorm": True,
        **PRE_NORM,
        "layer_idx": getattr(attention, "layer_idx", None),
    }


_TABLE = Table(
    (
        *linear("pre_layernorm", "ln_1"),
        *linear("attention.query_key_value", *(f"attn.{one}_proj" for one in "qkv")),
        *linear("attention.dense", "attn.out_proj"),
        *linear("output.dense1", "mlp.fc_in"),
        *linear("output.dense2", "mlp.fc_out"),
    ),
    ignored=("attn.bias", "attn.masked_bias", "attn.embed_positions"),
    causal_mask="attn.bias",
)

BLOCK = Replaced("transformers.models.gptj.modeling_gptj", "GPTJBlock", _arguments, _TABLE, _RotaryLayer)

translate_state_dict_to_hf_gptj = _TABLE.to_transformers
translate_hf_state_dict_to_smdistributed_gptj = _TABLE.to_distributed
translate_hf_gptj_state_dict_to_smdistributed_gptj = _TABLE.to_distributed
