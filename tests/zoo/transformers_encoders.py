"""Encoders of ``transformers``: they fill in masked tokens, or label each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.parity.models_language import LENGTH, NO_DROPOUT, VOCABULARY, masked_step, masked_tokens
from tests.parity.problem import BATCH, Models, own_loss

from .entry import Entry
from .entry_builders import SIZES, entry, model

PLAIN: dict[str, Any] = {**SIZES, **NO_DROPOUT}


def long_tokens(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Tokens of one length that sparse attention can cut into blocks."""
    ids = torch.randint(3, VOCABULARY, (BATCH, 16), generator=random)
    return ids, torch.ones_like(ids), ids


def unmasked_step(models: Models, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
    """A step of a model that knows no mask."""
    return own_loss(models, ids, labels=labels)


def replaced_step(models: Models, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
    """Which tokens are replaced: every other one, let us say."""
    return own_loss(models, ids, attention_mask=mask, labels=ids % 2)


def first_token_global_step(models: Models, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
    """The first token of each sample looks at all others."""
    everywhere = torch.zeros_like(mask)
    everywhere[:, 0] = 1
    return own_loss(models, ids, attention_mask=mask, global_attention_mask=everywhere, labels=labels)


def tokens_and_entities(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Tokens, and two entities of two tokens each."""
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=random)
    entities = torch.randint(3, 8, (BATCH, 2), generator=random)
    first = torch.randint(0, LENGTH - 1, (BATCH, 2, 1), generator=random)
    return ids, entities, torch.cat([first, first + 1], dim=2)


def entity_step(models: Models, ids: torch.Tensor, entities: torch.Tensor, positions: torch.Tensor) -> Any:
    output = models["model"](
        ids, entity_ids=entities, entity_position_ids=positions, labels=ids, entity_labels=entities
    )
    models["model"].backward(output.loss)
    return output.loss, output.logits, output.entity_logits


class XLNetModel(transformers.XLNetModel):
    """XLNet whose sinusoids have the precision of its weights, where the original's are always single."""

    def relative_positional_encoding(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        single: torch.Tensor = super().relative_positional_encoding(*args, **kwargs)
        return single.to(self.word_embedding.weight.dtype)


def xlnet() -> nn.Module:
    config = transformers.XLNetConfig(
        vocab_size=VOCABULARY, d_model=16, n_layer=5, n_head=2, d_inner=24, dropout=0.0, summary_last_dropout=0.0,
        mem_len=4, use_mems_train=True,
    )  # fmt: skip
    result = transformers.XLNetLMHeadModel(config)
    result.transformer = XLNetModel(config)
    return result.to(torch.get_default_dtype())


def masked(build: Callable[[], nn.Module], reason: str, **more: Any) -> Entry:
    return entry(build, masked_tokens, masked_step, "encoder", reason, **more)


def long(build: Callable[[], nn.Module], reason: str, **more: Any) -> Entry:
    return entry(build, long_tokens, masked_step, "encoder", reason, **more)


ENTRIES: dict[str, Entry] = {
    "ALBERT": masked(
        model(
            "AlbertForMaskedLM", embedding_size=8, num_hidden_groups=2, inner_group_num=2, classifier_dropout_prob=0.0,
            **PLAIN,
        ),
        "every layer is used several times, with gradients from each use",
    ),
    "DeBERTa": masked(
        model("DebertaForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8,
              **PLAIN),
        "disentangled attention; layers compute with an embedding of the encoder",
    ),
    "DeBERTa-v2": masked(
        model(
            "DebertaV2ForMaskedLM", relative_attention=True, position_buckets=4, max_relative_positions=8,
            pos_att_type=["p2c", "c2p"], conv_kernel_size=3, share_att_key=True, norm_rel_ebd="layer_norm", **PLAIN,
        ),
        "shared projections of positions, a convolution behind the first layer",
    ),
    "XLNet": masked(xlnet, "parameters that are no module's, memories of every layer collected in a tuple"),
    "Funnel": masked(
        model(
            "FunnelForMaskedLM", vocab_size=VOCABULARY, block_sizes=[2, 2, 1], num_decoder_layers=2, d_model=16,
            n_head=2, d_head=8, d_inner=24, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
            attention_type="factorized",
        ),
        "pools the sequence between blocks; a structure object carries state from layer to layer",
    ),
    "ELECTRA": entry(
        model("ElectraForPreTraining", embedding_size=8, **PLAIN),
        masked_tokens, replaced_step, "encoder", "a loss over the positions that the mask leaves",
    ),
    "DistilBERT": masked(
        model(
            "DistilBertForMaskedLM", vocab_size=VOCABULARY, dim=16, hidden_dim=24, n_layers=5, n_heads=2, dropout=0.0,
            attention_dropout=0.0, max_position_embeddings=2 * LENGTH,
        ),
        "a projection tied to the embedding, behind a transform",
    ),
    "MPNet": masked(model("MPNetForMaskedLM", **PLAIN), "one position bias made by the encoder for all layers"),
    "ModernBERT": masked(
        model(
            "ModernBertForMaskedLM", local_attention=4, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, cls_token_id=1, sep_token_id=2, **SIZES,
        ),
        "local and global layers with a rotary table for each",
    ),
    "RoFormer": masked(model("RoFormerForMaskedLM", embedding_size=8, **PLAIN), "sinusoids in a frozen embedding"),
    "ConvBERT": masked(
        model("ConvBertForMaskedLM", embedding_size=8, head_ratio=2, conv_kernel_size=3, num_groups=1, **PLAIN),
        "convolutions whose kernels are computed",
    ),
    "SqueezeBERT": masked(
        model("SqueezeBertForMaskedLM", embedding_size=16, q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1,
              intermediate_groups=2, output_groups=2, **PLAIN),
        "layers work on transposed views",
    ),
    "MobileBERT": masked(
        model(
            "MobileBertForMaskedLM", embedding_size=8, intra_bottleneck_size=8, num_feedforward_networks=2,
            true_hidden_size=8, normalization_type="no_norm", **PLAIN,
        ),
        "the head computes with the tied embedding joined to a weight of its own",
    ),
    "FNet": entry(
        model("FNetForMaskedLM", use_tpu_fourier_optimizations=False, pad_token_id=0, hidden_dropout_prob=0.0, **SIZES),
        masked_tokens, unmasked_step, "encoder", "complex numbers inside every layer",
    ),
    "Longformer": entry(
        model("LongformerForMaskedLM", attention_window=4, pad_token_id=0, **(PLAIN | {"max_position_embeddings": 24})),
        long_tokens, first_token_global_step, "encoder", "strided views of a sliding window, written to in place",
    ),
    "BigBird": long(
        model("BigBirdForMaskedLM", attention_type="original_full", block_size=4, **PLAIN),
        "switches its attention by the length of the input",
    ),
    "Nystromformer": long(
        model("NystromformerForMaskedLM", num_landmarks=4, segment_means_seq_len=16, conv_kernel_size=3, **PLAIN),
        "a pseudo-inverse by iteration",
    ),
    "Perceiver": entry(
        model(
            "PerceiverForMaskedLM", vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_latents=4, d_latents=16,
            d_model=16, num_blocks=2, num_self_attends_per_block=8, num_self_attention_heads=2, qk_channels=16,
            v_channels=16, num_cross_attention_heads=2, self_attention_widening_factor=2,
            attention_probs_dropout_prob=0.0,
        ),
        masked_tokens, masked_step, "encoder", "the same layers again in every block, and a tied head",
    ),
    "ESM": masked(
        model("EsmForMaskedLM", pad_token_id=1, mask_token_id=2, position_embedding_type="rotary", **PLAIN),
        "rescales embeddings by the number of masked tokens in each sample",
    ),
    "LUKE": entry(
        model("LukeForMaskedLM", entity_vocab_size=8, entity_emb_size=8, use_entity_aware_attention=True, **PLAIN),
        tokens_and_entities, entity_step, "encoder", "two streams through every layer, and a loss for each",
    ),
}  # fmt: skip
