"""The symbols of ``smp.nn``."""

from __future__ import annotations

from tests.compat.interface.rows import SMP, Symbol

_NN, _UTILS, _TRANSLATED = "`smp.nn`", "`smp.nn.utils`", "`smp.nn.huggingface`"
_OPTIONS = "Options of `smp.model_creation` and `smp.tensor_parallelism`"

_OF_HEADS = "num_attention_heads=32, attention_head_size=32, hidden_size=1024"
_DROPOUTS = "attention_dropout_prob=0.1, hidden_dropout_prob=0.1"
_WEIGHTS = "layernorm_epsilon=1e-5, initializer_range=0.02, use_normal_initialization=False"
_NORMS = "pre_layernorm=False, post_layernorm=True"
_LAYER = (
    f'{_OF_HEADS}, intermediate_size=4096, {_DROPOUTS}, activation="gelu", {_WEIGHTS}, causal_mask_size=None, '
    f"add_cross_attention=False, {_NORMS}"
)
_LMHEAD = (
    f"(num_layers=12, {_OF_HEADS}, intermediate_size=4096, vocab_size=30522, num_positions=1024, {_DROPOUTS}, "
    'activation="gelu", layernorm_epsilon=1e-5, num_token_types=0, causal_mask_size=None, add_cross_attention=False, '
    f"add_lm_head=True, initializer_range=0.02, use_normal_initialization=False, {_NORMS})"
)
_FLASH = (
    "(attention_dropout_prob=0.1, attention_head_size=None, scale_attention_scores=True, "
    "scale_attn_by_layer_idx=False, layer_idx=None, scale=None, triton_flash_attention=False, use_alibi=False)"
)


def _module(name: str, signature: str | None = None, differs: str = "") -> Symbol:
    return Symbol(f"smp.nn.{name}", _NN, signature, f"{SMP}.nn:{name}", differs=differs)


def _translation(model: str, *names: str) -> tuple[Symbol, ...]:
    where = f"{SMP}.nn.huggingface.{model}"
    back = f"translate_state_dict_to_hf_{model}"
    there = (f"translate_hf_state_dict_to_smdistributed_{model}", *names)
    names = ((back, "(state_dict, max_seq_len=None)"), *((name, "(state_dict)") for name in there))
    return tuple(
        Symbol(f"{model}.{name}", _TRANSLATED, signature, f"{where}:{name}", here=f"shardwright.nn.huggingface.{model}")
        for name, signature in names
    )


def _option(name: str, differs: str = "", signed: bool = True) -> Symbol:
    """An option of distributed transformer layers, or one that has no effect on them."""
    path = "" if not signed else f"shardwright.nn.transformer:LayerOptions.__annotations__.{name}"
    return Symbol(name, _OPTIONS, path=path or f"{SMP}:model_creation", differs=differs)


_NO_CHOICE = "No effect: PyTorch chooses the kernels."

MODULES: tuple[Symbol, ...] = (
    _module("DistributedModule", "()"),
    _module("DistributedLinear", "(in_features, out_features)"),
    _module(
        "DistributedEmbedding",
        "(num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, "
        "sparse=False, _weight=None, initializer_range=0.02, _skip_allgather=False, _skip_scatter_and_merge=False)",
    ),
    _module("DistributedLayerNorm", "(normalized_shape)"),
    _module(
        "DistributedAttentionLayer",
        f"({_OF_HEADS}, {_DROPOUTS}, {_WEIGHTS}, cross_attention=False, causal_mask_size=None, {_NORMS})",
    ),
    _module(
        "DistributedTransformerOutputLayer",
        "(hidden_size=1024, intermediate_size=4096, hidden_dropout_prob=0.1, "
        f'activation="gelu", {_WEIGHTS}, {_NORMS}, fp32_residual_addition=False)',
    ),
    _module("DistributedTransformerLayer", f"({_LAYER}, *, use_alibi=False, alibi_bias_max=8)"),
    _module("DistributedTransformer", f"(num_layers=12, {_LAYER})"),
    _module(
        "DistributedTransformerLMHead",
        _LMHEAD,
        "Logits have the batch in their first dimension. With labels it returns the loss alone.",
    ),
    _module(
        "FlashAttentionLayer",
        _FLASH,
        "Computed by PyTorch's attention; `triton_flash_attention` says which results are wanted, not which kernel.",
    ),
    _module("FusedLayerNorm", "(normalized_shape)"),
    Symbol(
        "DistributedTransformer.seq_layers",
        _NN,
        made="transformer",
        differs="Of a model of `transformers` whose layers are replaced, it is its list of layers, an `nn.ModuleList`; "
        "`smp.set_activation_checkpointing` takes each of them by itself.",
    ),
    Symbol("DistributedTransformerLMHead.transformer", _NN, made="language model"),
    Symbol("DistributedTransformerLayer.attention", _NN, made="layer"),
    Symbol("DistributedTransformerLayer.output", _NN, made="layer"),
    *(
        Symbol(f"smp.nn.utils.{name}", _UTILS, signature, f"{SMP}.nn.utils:{name}")
        for name, signature in (
            (
                "parameter_creation_scope",
                "(module, scaled_batch=True, dtype=None, use_normal=False, initializer_range=0.02)",
            ),
            ("initialize_with_input_partition", "(module)"),
            ("initialize_with_output_partition", "(module)"),
            ("fused_allgather_for_tp", "(tensor, dim)"),
            ("fwd_allreduce_for_tp", "(tensor)"),
            ("bwd_allreduce_for_tp", "(tensor)"),
            ("scatter_and_merge_for_tp", "(tensor, split_dim, merge_dim)"),
            ("reduce_scatter_for_tp", "(tensor, dim)"),
        )
    ),
    *_translation("gpt2", "translate_hf_state_dict_to_smdistributed", "translate_hf_block_state_dict_to_smdistributed"),
    Symbol(
        "gpt2.translate_layer_state_dict_to_hf_gpt2_block",
        _TRANSLATED,
        "(state_dict, max_seq_len=None)",
        f"{SMP}.nn.huggingface.gpt2:translate_layer_state_dict_to_hf_gpt2_block",
        here="shardwright.nn.huggingface.gpt2",
    ),
    Symbol(
        "gpt2.get_hf_gpt2_transformer_layer_hooks",
        _TRANSLATED,
        "()",
        f"{SMP}.nn.huggingface.gpt2:get_hf_gpt2_transformer_layer_hooks",
        differs="The three hooks of `smp.tp_register_with_module`, for a script's own kind of `GPT2Block`.",
    ),
    *_translation("bert"),
    *_translation("roberta", "translate_state_dict_to_smdistributed"),
    *_translation("gptj", "translate_hf_gptj_state_dict_to_smdistributed_gptj"),
    *_translation("gptneo", "translate_hf_gptneo_state_dict_to_smdistributed"),
    *_translation("gptneox"),
    *(
        Symbol(
            name,
            _TRANSLATED,
            path=f"shardwright.nn.attention:AttentionOptions.__annotations__.{ours}",
            here=ours,
            differs="Of the configuration of GPT-2, and of GPT-J where that has it.",
        )
        for name, ours in (
            ("scale_attn_weights", "scale_attention_scores"),
            ("scale_attn_by_inverse_layer_idx", "scale_attn_by_layer_idx"),
            ("reorder_and_upcast_attn", "attention_in_fp32"),
        )
    ),
    _option("attention_in_fp32"),
    _option("fp32_residual_addition"),
    _option("use_alibi"),
    _option("fused_softmax", _NO_CHOICE, signed=False),
    _option("fused_bias_gelu", _NO_CHOICE, signed=False),
    _option("fused_dropout", _NO_CHOICE, signed=False),
    _option("flash_attention", _NO_CHOICE, signed=False),
    _option(
        "query_key_layer_scaling",
        "No effect; `scale_attn_by_inverse_layer_idx` of the model's configuration divides scores.",
        signed=False,
    ),
    _option(
        "distribute_embedding",
        "No effect: embeddings are divided where they are marked.",
        signed=False,
    ),
    _option(
        "zero_init",
        "No effect: weights are those of the replaced modules.",
        signed=False,
    ),
)
