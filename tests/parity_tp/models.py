"""Models of ``transformers``, tiny, whose layers ``smp.DistributedModel`` replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import shardwright as smp
import torch
import transformers as t
from torch import nn

from .problem import LENGTH, Batch, Problem, normal

WORDS, WIDTH, IGNORED = 30, 16, -100
#: Heads divide by a degree of 4, also those of keys and values.
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
WIDE: dict[str, Any] = {**SIZES, "intermediate_size": 24}
GROUPED: dict[str, Any] = {**WIDE, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT: dict[str, Any] = {**SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NEOX: dict[str, Any] = {**WIDE, "hidden_dropout": 0.0, "attention_dropout": 0.0, "classifier_dropout": 0.0}


def _loss(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _tokens(samples: int, random: torch.Generator) -> Batch:
    """Sequences of different lengths, so that some ranks have padding and others have none."""
    ids = torch.randint(3, WORDS, (samples, LENGTH), generator=random)
    lengths = torch.randint(LENGTH - 2, LENGTH + 1, (samples, 1), generator=random)
    shown = torch.arange(LENGTH) < lengths
    return {"input_ids": ids, "attention_mask": shown.long(), "labels": ids.masked_fill(~shown, IGNORED)}


def _with_states(samples: int, random: torch.Generator) -> Batch:
    shown = torch.arange(3) < torch.randint(2, 4, (samples, 1), generator=random)
    states = {"encoder_hidden_states": normal(random, samples, 3, WIDTH), "encoder_attention_mask": shown.long()}
    return _tokens(samples, random) | states


def _pictures(samples: int, random: torch.Generator) -> Batch:
    labels = torch.randint(0, 5, (samples,), generator=random)
    return {"pixel_values": normal(random, samples, 3, 8, 8), "labels": labels}


def _model(
    make: Callable[[], nn.Module],
    replaced: Mapping[str, int],
    batch: Callable[[int, torch.Generator], Batch] = _tokens,
) -> Problem:
    def whole() -> nn.Module:
        with smp.tensor_parallelism():
            model: Any = make().double()
        model.config.use_cache = False
        with torch.no_grad():  # no weight at a value that hides a fault
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model  # type: ignore[no-any-return]

    return Problem(whole, batch, _loss, replaced=replaced)


def _neo() -> nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 16}
    types = [[["global", "local"], 1], [["global"], 1]]
    return t.GPTNeoForCausalLM(t.GPTNeoConfig(**sizes, attention_types=types, window_size=3))


def _t5() -> nn.Module:
    return t.T5ForConditionalGeneration(
        t.T5Config(
            vocab_size=WORDS,
            d_model=WIDTH,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def _vit() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24}
    picture = {"image_size": 8, "patch_size": 4, "num_labels": 5}
    return t.ViTForImageClassification(t.ViTConfig(**sizes, **NO_DROPOUT, **picture))


def _mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return t.MixtralForCausalLM(t.MixtralConfig(**GROUPED, **experts))


PROBLEMS: dict[str, Problem] = {
    "GPT-2": _model(lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT)), {"GPT2Block": 3}),
    "GPT-2, cross-attention": _model(
        lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT, add_cross_attention=True, n_inner=24)),
        {"GPT2Block": 3},
        _with_states,
    ),
    "BERT": _model(lambda: t.BertForMaskedLM(t.BertConfig(**WIDE, **NO_DROPOUT)), {"BertLayer": 3}),
    "RoBERTa": _model(lambda: t.RobertaForMaskedLM(t.RobertaConfig(**WIDE, **NO_DROPOUT)), {"RobertaLayer": 3}),
    "GPT-J": _model(lambda: t.GPTJForCausalLM(t.GPTJConfig(**GPT, rotary_dim=2)), {"GPTJBlock": 3}),
    "GPT-Neo": _model(_neo, {"GPTNeoBlock": 3}),
    "GPT-NeoX": _model(lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**NEOX)), {"GPTNeoXLayer": 3}),
    "GPT-NeoX, sequential": _model(
        lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**NEOX, use_parallel_residual=False)), {"GPTNeoXLayer": 3}
    ),
    "T5": _model(_t5, {"T5Block": 4}),
    "ViT": _model(_vit, {"ViTLayer": 3}, _pictures),
    "Llama": _model(lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED)), {"LlamaDecoderLayer": 3}),
    "Mistral": _model(
        lambda: t.MistralForCausalLM(t.MistralConfig(**GROUPED, sliding_window=3)), {"MistralDecoderLayer": 3}
    ),
    "Qwen3": _model(lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**GROUPED)), {"Qwen3DecoderLayer": 3}),
    "Mixtral": _model(_mixtral, {"MixtralAttention": 3, "MixtralExperts": 3}),
}
