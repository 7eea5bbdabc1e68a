"""Small models and data for Trainer, each with what it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH = 96, 32, 24
SAMPLES = 40
#: How many samples the data sets of evaluation have: one that batches and ranks divide, one that they do not.
EVALUATED = {"even": 16, "odd": 13}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A list of samples."""

    def __init__(self, samples: list[dict[str, torch.Tensor]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._samples[index]


@dataclass(frozen=True)
class Kind:
    """A kind of training.

    Attributes:
        build: Makes the model, with this dropout.
        sample: Makes a sample.
        metrics: What is computed of predictions and labels.
        generates: Whether predictions are generated.
        accumulated: Of how many batches gradients are accumulated.
    """

    build: Callable[[float], nn.Module]
    sample: Callable[[torch.Generator, torch.dtype], dict[str, torch.Tensor]]
    metrics: Callable[[Any], dict[str, float]]
    generates: bool = False
    accumulated: int = 2


def data(kind: Kind, dtype: torch.dtype) -> tuple[Samples, dict[str, Samples]]:
    """Return what is trained on, and what is evaluated."""
    generator = torch.Generator().manual_seed(5)

    def draw(count: int) -> Samples:
        return Samples([kind.sample(generator, dtype) for _ in range(count)])

    return draw(SAMPLES), {name: draw(count) for name, count in EVALUATED.items()}


# --- text


def _text(generator: torch.Generator, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Padded text: samples have different numbers of labels."""
    length = int(torch.randint(4, LENGTH + 1, (), generator=generator))
    ids = torch.randint(2, VOCABULARY, (LENGTH,), generator=generator)
    mask = torch.arange(LENGTH) < length
    return {
        "input_ids": torch.where(mask, ids, 0),
        "attention_mask": mask.long(),
        "labels": torch.where(mask, ids, -100),
    }


def _whole_text(generator: torch.Generator, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Text without padding: every sample has as many labels. The first is none, since labels are shifted."""
    ids = torch.randint(2, VOCABULARY, (LENGTH,), generator=generator)
    labels = torch.cat([torch.tensor([-100]), ids[1:]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _of_text(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    hits = logits[:, :-1].argmax(-1) == labels[:, 1:]
    counted = labels[:, 1:] != -100
    return {"accuracy": float(hits[counted].mean()), "mean": float(np.abs(logits).mean()), "rows": len(labels)}


def _gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=4,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=1,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


def _llama(dropout: float) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=dropout,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    adapters = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        lora_dropout=dropout,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(LlamaForCausalLM(config), adapters)


# --- pairs


def _pair(generator: torch.Generator, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    sample = _text(generator, dtype)
    length = int(torch.randint(2, 9, (), generator=generator))
    labels = torch.randint(2, VOCABULARY, (8,), generator=generator)
    return {**sample, "labels": torch.where(torch.arange(8) < length, labels, -100)}


def _of_pairs(prediction: Any) -> dict[str, float]:
    tokens = prediction.predictions
    weights = np.arange(1, tokens.shape[1] + 1)
    return {"tokens": float((tokens * weights).sum()), "rows": len(tokens), "width": tokens.shape[1]}


def _t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5ForConditionalGeneration(config)


# --- pictures


def _picture(generator: torch.Generator, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(3, 16, 16, generator=generator, dtype=torch.float64).to(dtype),
        "labels": torch.randint(5, (), generator=generator),
    }


def _of_pictures(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    hits = logits.argmax(-1) == labels
    return {"accuracy": float(hits.mean()), "mean": float(np.abs(logits).mean()), "rows": len(labels)}


def _vit(dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        image_size=16,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return ViTForImageClassification(config)


KINDS = {
    "gpt2": Kind(_gpt2, _text, _of_text),
    "llama-lora": Kind(_llama, _text, _of_text),
    # Trainer in one process adds up the means of accumulated batches, as if they were sums.
    "t5": Kind(_t5, _pair, _of_pairs, generates=True, accumulated=1),
    "vit": Kind(_vit, _picture, _of_pictures),
}

#: What is trained on the path for the original library, where a loss is the mean over microbatches.
ORIGINAL = {"smp-gpt2": Kind(_gpt2, _whole_text, _of_text), "smp-vit": KINDS["vit"]}
