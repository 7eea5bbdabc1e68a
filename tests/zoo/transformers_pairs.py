"""Encoders with decoders, from text or from speech, and encoders of speech."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.parity.models_architectures import speech, transcribe
from tests.parity.models_language import LENGTH, NO_DROPOUT, T5_SIZES, VOCABULARY, pair_step, pairs
from tests.parity.problem import BATCH, Models, own_loss

from .entry import Entry
from .entry_builders import SIZES, entry, model

#: Sizes of BART and of what came from it.
PAIR: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 2 * LENGTH,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
T5: dict[str, Any] = {**T5_SIZES, "num_layers": 3, "num_decoder_layers": 3}
#: Sizes of Wav2Vec2 and of what came from it. Nothing is masked: masks are drawn by NumPy.
WAVES: dict[str, Any] = {
    **SIZES,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": False,
    "pad_token_id": 0,
}
SPEECH = "speech"


def paired(build: Callable[[], nn.Module], reason: str, kind: str = "encoder-decoder", **more: Any) -> Entry:
    return entry(build, pairs, pair_step, kind, reason, **more)


def encoder_with_decoder() -> nn.Module:
    """Two models of the library, put together by it."""
    dropouts = {**SIZES, **NO_DROPOUT}
    config = transformers.EncoderDecoderConfig(
        encoder=transformers.BertConfig(**dropouts).to_dict(),
        decoder=transformers.BertConfig(is_decoder=True, add_cross_attention=True, **dropouts).to_dict(),
        pad_token_id=0,
        decoder_start_token_id=1,
    )
    result: nn.Module = transformers.EncoderDecoderModel(config)
    return result


def prophet() -> nn.Module:
    keys = {name: value for name, value in PAIR.items() if name not in ("d_model", "encoder_layers", "decoder_layers")}
    config = transformers.ProphetNetConfig(
        hidden_size=16, num_encoder_layers=5, num_decoder_layers=3, num_encoder_attention_heads=2, ngram=2,
        num_decoder_attention_heads=2, num_buckets=8, relative_max_distance=16, disable_ngram_loss=False, **keys,
    )  # fmt: skip
    result: nn.Module = transformers.ProphetNetForConditionalGeneration(config)
    return result


def t5gemma() -> nn.Module:
    half = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4}
    half |= {"query_pre_attn_scalar": 8, "dropout_rate": 0.0, "attention_dropout": 0.0}
    config = transformers.T5GemmaConfig(
        encoder=half, decoder=half, dropout_rate=0.0, classifier_dropout_rate=0.0, pad_token_id=0, bos_token_id=0,
        eos_token_id=1, vocab_size=VOCABULARY,
    )  # fmt: skip
    result: nn.Module = transformers.T5GemmaForConditionalGeneration(config)
    return result


def switch() -> nn.Module:
    """Its routers convert their weights to single precision, whose sums depend on their order: not here."""
    build = model(
        "SwitchTransformersForConditionalGeneration", num_experts=3, expert_capacity=8, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, router_jitter_noise=0.0, output_router_logits=True, router_aux_loss_coef=0.1,
        router_z_loss_coef=0.1, **T5,
    )  # fmt: skip
    result = build()
    for part in result.modules():
        if type(part).__name__ == "SwitchTransformersTop1Router":
            part.dtype = torch.get_default_dtype()
    return result


def long_pairs(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    source = torch.randint(3, VOCABULARY, (BATCH, 16), generator=random)
    return source, torch.randint(3, VOCABULARY, (BATCH, LENGTH - 3), generator=random)


def waves(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 160, generator=random), torch.randint(1, VOCABULARY, (BATCH, 3), generator=random)


def connect(models: Models, waves: torch.Tensor, labels: torch.Tensor) -> Any:
    """Connectionist temporal classification."""
    return own_loss(models, input_values=waves, labels=labels)


def spectrograms(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 16, 8, generator=random), torch.randint(5, (BATCH,), generator=random)


def read_spectrograms(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    features = torch.randn(BATCH, 2 * LENGTH, 6, generator=random)
    return features, torch.randint(3, VOCABULARY, (BATCH, LENGTH - 3), generator=random)


ENTRIES: dict[str, Entry] = {
    "BART": paired(model("BartForConditionalGeneration", **PAIR), "one embedding for encoder, decoder and head"),
    "T5": paired(model("T5ForConditionalGeneration", **T5), "a position bias that the first layer makes for all"),
    "mT5": paired(
        model("MT5ForConditionalGeneration", feed_forward_proj="gated-gelu", tie_word_embeddings=False, **T5),
        "gated feed-forward; reads the dtype of a weight before it casts",
    ),
    "LongT5": entry(
        model(
            "LongT5ForConditionalGeneration", encoder_attention_type="transient-global", local_radius=3,
            global_block_size=4, **T5,
        ),
        long_pairs, pair_step, "encoder-decoder", "global tokens made from blocks of the input",
    ),
    "Pegasus": paired(model("PegasusForConditionalGeneration", **PAIR), "sinusoids in frozen embeddings"),
    "Marian": paired(model("MarianMTModel", **PAIR), "a bias of the tied head that is a buffer"),
    "M2M-100": paired(
        model("M2M100ForConditionalGeneration", encoder_layerdrop=0.0, decoder_layerdrop=0.0, **PAIR),
        "positions counted from the tokens, weights of sinusoids in buffers",
    ),
    "LED": entry(
        model(
            "LEDForConditionalGeneration", attention_window=4, max_encoder_position_embeddings=24,
            max_decoder_position_embeddings=2 * LENGTH,
            **{key: value for key, value in PAIR.items() if key != "max_position_embeddings"},
        ),
        long_pairs, pair_step, "encoder-decoder", "windowed attention in the encoder, full in the decoder",
    ),
    "ProphetNet": paired(prophet, "predicts several tokens at once with shared weights"),
    "BERT to BERT": paired(encoder_with_decoder, "two models put together by a third"),
    "T5Gemma": paired(t5gemma, "grouped queries, soft caps, and two masks on both sides"),
    "Switch Transformers": paired(
        switch, "drops tokens beyond an expert's capacity; two losses of the routers", "mixture of experts"
    ),
    "Whisper": entry(
        model(
            "WhisperForConditionalGeneration", num_mel_bins=6, max_source_positions=LENGTH, max_target_positions=LENGTH,
            suppress_tokens=None, begin_suppress_tokens=None,
            **({key: value for key, value in PAIR.items() if key != "max_position_embeddings"} | SPECIAL),
        ),
        speech, transcribe, SPEECH, "convolutions before the encoder, frozen sinusoids, cross attention",
    ),
    "Speech2Text": entry(
        model(
            "Speech2TextForConditionalGeneration", input_feat_per_channel=6, conv_channels=8, num_conv_layers=2,
            conv_kernel_sizes=(3, 3), max_source_positions=2 * LENGTH, max_target_positions=2 * LENGTH,
            encoder_layerdrop=0.0, decoder_layerdrop=0.0,
            **({key: value for key, value in PAIR.items() if key != "max_position_embeddings"}),
        ),
        read_spectrograms, transcribe, SPEECH, "gated convolutions; masks made anew for the shorter sequence",
    ),
    "Wav2Vec2": entry(
        model("Wav2Vec2ForCTC", **WAVES), waves, connect, SPEECH, "weight norm; writes to hidden states in place"
    ),
    "HuBERT": entry(
        model("HubertForCTC", conv_pos_batch_norm=True, **WAVES), waves, connect, SPEECH,
        "batch norm in the position embedding",
    ),
    "WavLM": entry(
        model("WavLMForCTC", num_buckets=8, max_bucket_distance=16, **WAVES), waves, connect, SPEECH,
        "a position bias from the first layer, passed on and gated in each",
    ),
    "Data2Vec audio": entry(
        model("Data2VecAudioForCTC", conv_pos_kernel_size=3, **WAVES), waves, connect, SPEECH,
        "several convolutions for positions",
    ),
    "AST": entry(
        model(
            "ASTForAudioClassification", patch_size=4, frequency_stride=4, time_stride=4, max_length=16,
            num_mel_bins=8, num_labels=5, **SIZES, **NO_DROPOUT,
        ),
        spectrograms, connect, SPEECH, "two tokens that are parameters, expanded to the batch",
    ),
}  # fmt: skip
