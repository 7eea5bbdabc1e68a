"""More architectures of ``transformers``, divided automatically: vision, speech, state spaces, several towers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from .models_language import (
    LAYERS,
    LENGTH,
    NO_DROPOUT,
    SIZES,
    VOCABULARY,
    causal_step,
    gpt2,
    llama,
    pair_step,
    pairs,
    tokens,
)
from .problem import BATCH, Models, Phase, Problem, one, own_loss

SIDE = 16
VISION = {"image_size": SIDE, "patch_size": 4, "num_channels": 3, "num_labels": 5}


def deberta() -> nn.Module:
    """Its layers read a weight that the encoder holds."""
    config = transformers.DebertaV2Config(
        relative_attention=True,
        position_buckets=4,
        max_relative_positions=8,
        pos_att_type=["p2c", "c2p"],
        **SIZES,
        **NO_DROPOUT,
    )
    return transformers.DebertaV2ForMaskedLM(config)


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=2 * LENGTH,
        dropout=0.0,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config)


def mamba() -> nn.Module:
    """Its mixers compute with their children's weights."""
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=3)
    return transformers.MambaForCausalLM(config)


def neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(**SIZES)
    return transformers.GPTNeoXForCausalLM(config)


def bloom() -> nn.Module:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=3, n_head=2)
    )


def gemma() -> nn.Module:
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY, num_key_value_heads=1, head_dim=8, sliding_window=4, **LAYERS
    )
    return transformers.Gemma3ForCausalLM(config)


def qwen() -> nn.Module:
    config = transformers.Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=1, head_dim=8, **LAYERS)
    return transformers.Qwen3ForCausalLM(config)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, **LAYERS, **NO_DROPOUT))


def swin() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=SIDE,
        patch_size=2,
        embed_dim=8,
        depths=[1, 2],
        num_heads=[1, 2],
        window_size=4,
        drop_path_rate=0.0,
        num_labels=5,
    )
    return transformers.SwinForImageClassification(config)


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 12], depths=[1, 2], num_stages=2, num_labels=5)
    return transformers.ConvNextForImageClassification(config)


def clip() -> nn.Module:
    """Two towers, whose results meet in a product of all with all."""
    config = transformers.CLIPConfig(
        text_config={"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": 2, **LAYERS},
        vision_config={"image_size": SIDE, "patch_size": 4, **LAYERS},
        projection_dim=8,
    )
    return transformers.CLIPModel(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=6,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=LENGTH,
        max_target_positions=LENGTH,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def checkpointed(build: Callable[[], Any], reentrant: bool) -> Callable[[], nn.Module]:
    def checkpointing() -> nn.Module:
        model = build()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        result: nn.Module = model
        return result

    return checkpointing


def images(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 3, SIDE, SIDE, generator=random), torch.randint(5, (BATCH,), generator=random)


def images_and_tokens(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=random)
    ids[:, -1] = 2
    return torch.randn(BATCH, 3, SIDE, SIDE, generator=random), ids


def speech(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    features = torch.randn(BATCH, 6, 2 * LENGTH, generator=random)
    return features, torch.randint(3, VOCABULARY, (BATCH, LENGTH - 3), generator=random)


def classify(models: Models, images: torch.Tensor, labels: torch.Tensor) -> Any:
    return own_loss(models, pixel_values=images, labels=labels)


def contrast(models: Models, images: torch.Tensor, ids: torch.Tensor) -> Any:
    return own_loss(models, input_ids=ids, pixel_values=images, return_loss=True, results=("logits_per_image",))


def transcribe(models: Models, features: torch.Tensor, labels: torch.Tensor) -> Any:
    return own_loss(models, input_features=features, labels=labels)


def all_layers_step(models: Models, ids: torch.Tensor) -> Any:
    """A loss from every layer's hidden state and attention, which hooks collect on whichever rank they are."""
    output = models["model"](input_ids=ids, labels=ids, output_hidden_states=True, output_attentions=True)
    hidden = sum((index + 1) * state.square().mean() for index, state in enumerate(output.hidden_states))
    attention = sum(weights.square().mean() for weights in output.attentions)
    loss = output.loss + 0.1 * hidden + attention
    models["model"].backward(loss)
    return loss, output.hidden_states, output.attentions


def eager_gpt2() -> nn.Module:
    model = gpt2()
    model.set_attn_implementation("eager")
    return model


def language(build: Callable[[], nn.Module]) -> Problem:
    return Problem(build=one(build), batch=tokens, phases=(Phase(body=causal_step),))


def vision(build: Callable[[], nn.Module]) -> Problem:
    return Problem(build=one(build), batch=images, phases=(Phase(body=classify),))


PROBLEMS: dict[str, Problem] = {
    "DeBERTa": language(deberta),
    "Mamba": language(mamba),
    "GPT-NeoX": language(neox),
    "BLOOM": language(bloom),
    "Gemma": language(gemma),
    "Qwen": language(qwen),
    "BART": Problem(build=one(bart), batch=pairs, phases=(Phase(body=pair_step),)),
    "ViT": vision(vit),
    "Swin": vision(swin),
    "ConvNeXt": vision(convnext),
    "CLIP": Problem(build=one(clip), batch=images_and_tokens, phases=(Phase(body=contrast),)),
    "Whisper": Problem(build=one(whisper), batch=speech, phases=(Phase(body=transcribe),)),
    "GPT-2, every layer's states": Problem(build=one(eager_gpt2), batch=tokens, phases=(Phase(body=all_layers_step),)),
    "GPT-2, checkpointing": language(checkpointed(gpt2, reentrant=False)),
    "Llama, reentrant checkpointing": language(checkpointed(llama, reentrant=True)),
}
