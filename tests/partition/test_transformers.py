"""Models of transformers: joined exactly where one module computes with another's weight, and shared out whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright.model.ownership import apply_ownership
from shardwright.partition.decide import decide
from shardwright.partition.decision import Decision
from torch import nn

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}


def text(**more: Any) -> dict[str, Any]:
    return {"input_ids": torch.randint(4, 64, (2, 8)), **more}


def labelled() -> dict[str, Any]:
    return text(labels=torch.randint(4, 64, (2, 8)))


def image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=2, d_model=32, d_kv=16, num_heads=2, d_ff=64, vocab_size=64, decoder_start_token_id=0
        )
    )


def make(model: str, config: str, **keys: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**keys))


def wav2vec2() -> nn.Module:
    return transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(
            **SMALL, num_hidden_layers=2, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3),
            num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
        )
    )  # fmt: skip


# For each model: how to build it, what it is called with, and the pairs of modules that must share a rank.
MIXER = [
    (f"backbone.layers.{i}.mixer", f"backbone.layers.{i}.mixer.{name}")
    for i in (0, 1)
    for name in ("conv1d", "dt_proj")
]
NORMED = "wav2vec2.encoder.pos_conv_embed.conv"
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], list[tuple[str, str]]]] = {
    "gpt2": (gpt2, labelled, []),
    "bert": (make("BertForMaskedLM", "BertConfig", num_hidden_layers=4, **SMALL), labelled, []),
    "roberta": (make("RobertaForMaskedLM", "RobertaConfig", num_hidden_layers=4, **SMALL), labelled, []),
    "t5": (t5, labelled, []),
    "llama": (
        make("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=4, num_key_value_heads=2, **SMALL), labelled, [],
    ),
    "mixtral": (
        make(
            "MixtralForCausalLM", "MixtralConfig", num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4,
            output_router_logits=True, **SMALL,
        ),
        labelled, [],
    ),
    "albert": (
        make("AlbertForMaskedLM", "AlbertConfig", num_hidden_layers=4, embedding_size=16, **SMALL), labelled, [],
    ),
    "resnet": (
        make("ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        image, [],
    ),
    "vit": (
        make(
            "ViTForImageClassification", "ViTConfig", num_hidden_layers=2, image_size=32, patch_size=8,
            **{k: v for k, v in SMALL.items() if k != "vocab_size"},
        ),
        image, [],
    ),
    "deberta": (
        make(
            "DebertaV2ForMaskedLM", "DebertaV2Config", num_hidden_layers=2, relative_attention=True,
            pos_att_type=["c2p", "p2c"], **SMALL,
        ),
        labelled, [("deberta.encoder", "deberta.encoder.rel_embeddings")],
    ),
    "mamba": (
        make("MambaForCausalLM", "MambaConfig", num_hidden_layers=2, hidden_size=32, vocab_size=64, state_size=4),
        labelled, MIXER,
    ),
    "wav2vec2": (
        wav2vec2, lambda: {"input_values": torch.randn(2, 800)},
        [(NORMED, f"{NORMED}.parametrizations.weight"), (NORMED, f"{NORMED}.parametrizations.weight.0")],
    ),
}  # fmt: skip


def decided(name: str) -> tuple[Callable[[], nn.Module], Decision]:
    build, inputs, _ = CASES[name]
    torch.manual_seed(0)
    model = build()
    cfg = SimpleNamespace(
        auto_partition=True, default_partition=0, memory_weight=0.8, skip_tracing=False, refine_partition=False
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    decision = decide(model, functools.partial(model, **inputs()), cfg, 2)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return build, decision


@pytest.mark.parametrize("name", CASES)
def test_modules_are_joined_exactly_where_weights_are_read(name: str) -> None:
    _, decision = decided(name)
    assert sorted(join.modules for join in decision.joins) == sorted(CASES[name][2])
    for first, second in CASES[name][2]:
        assert decision.modules[first] == decision.modules[second]
    assert decision.one_at_a_time == ()


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama", "mixtral", "resnet"])
def test_both_ranks_hold_a_fair_part_and_together_the_whole(name: str) -> None:
    build, decision = decided(name)
    whole = build()
    expected = sum(p.nbytes for p in whole.parameters())
    held = [decision.parameter_bytes(rank) for rank in range(2)]
    assert sum(held) == expected
    assert min(held) >= 0.2 * expected
    names = []
    for rank in range(2):
        model = build()
        share = apply_ownership(model, decision, rank)
        assert sum(parameter.nbytes for parameter in share.local_parameters()) == held[rank]
        assert sum(buffer.nbytes for buffer in share.local_buffers()) == decision.buffer_bytes(rank)
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in whole.named_parameters()]
        names += [n for n, _ in share.local_named_parameters()]
        model.train()
        model.zero_grad()
        assert set(model.state_dict()) == set(whole.state_dict())
    assert sorted(names) == sorted(n for n, _ in whole.named_parameters())
