"""Layers of ``transformers`` are divided exactly, and their state dicts are translated both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.nn.huggingface.layer import added_mask, returns_tuple
from torch import nn

from tests.jobs.ranks import outputs_of_ranks

transformers: Any = pytest.importorskip("transformers")
PROGRAM = Path(__file__).with_name("transformers_models.py")
hf = smp.nn.huggingface
MIN = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("arguments", "number"), [(["speed"], 16), (["memory", "gpt2", "gptj", "llama", "mixtral", "t5"], 7)]
)
def test_models_compute_what_they_did(arguments: list[str], number: int) -> None:
    for output in outputs_of_ranks(PROGRAM, *arguments):
        assert sum(line.endswith(" holds") for line in output.splitlines()) == number


def test_state_dicts_are_translated_both_ways() -> None:
    config = transformers.GPT2Config(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=5, add_cross_attention=True
    )
    state = transformers.GPT2LMHeadModel(config).state_dict()
    ours = hf.gpt2.translate_hf_state_dict_to_smdistributed_gpt2(state)
    name = "transformer.h.1.attention.query_key_value.weight"
    assert torch.equal(ours[name], state["transformer.h.1.attn.c_attn.weight"].T)
    assert ours["transformer.wte.weight"] is state["transformer.wte.weight"]
    back = hf.gpt2.translate_state_dict_to_hf_gpt2(ours)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], value) for key, value in state.items())

    older = hf.gpt2.translate_state_dict_to_hf_gpt2(ours, max_seq_len=4)
    assert older["transformer.h.0.attn.bias"].shape == (1, 1, 4, 4)
    assert hf.gpt2.translate_hf_state_dict_to_smdistributed(older).keys() == ours.keys()


@pytest.mark.parametrize(("degree", "optimize"), [(1, "speed"), (2, "speed"), (2, "memory")])
def test_distributed_language_models_compute_with_translated_weights_what_theirs_do(degree: int, optimize: str) -> None:
    for output in outputs_of_ranks(PROGRAM.with_name("whole_models.py"), str(degree), optimize, ranks=degree):
        assert output.endswith("whole models hold\n")


def test_what_a_distributed_language_model_has_no_place_for_is_refused() -> None:
    config = transformers.GPT2Config(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=5)
    state = transformers.GPT2LMHeadModel(config).state_dict()
    to_distributed = hf.gpt2.translate_hf_state_dict_to_smdistributed_gpt2_lm_head
    to_transformers = hf.gpt2.translate_state_dict_to_hf_gpt2_lm_head
    older = to_transformers(to_distributed(state), max_seq_len=4)
    assert older["transformer.h.0.attn.bias"].shape == (1, 1, 4, 4)
    assert to_distributed(older).keys() == to_distributed(state).keys()
    with pytest.raises(smp.ConfigError, match=r"'lm_head\.weight' and 'transformer\.wte\.weight' differ"):
        to_distributed({**state, "lm_head.weight": state["lm_head.weight"] + 1})
    with pytest.raises(smp.ConfigError, match=r"'h\.0\.ln_1\.weight', which is no name of a GPT2LMHeadModel"):
        to_distributed({"h.0.ln_1.weight": torch.ones(8)})
    with pytest.raises(smp.ConfigError, match=r"'transformer\.wte\.weight', which is no name of a Distributed"):
        to_transformers(state)
    with pytest.raises(smp.ConfigError, match=r"'token_type_embedding\.weight', which is no name of a Distributed"):
        to_transformers({**to_distributed(state), "token_type_embedding.weight": torch.ones(2, 8)})


def test_names_within_names_and_unequal_parts_are_told_apart() -> None:
    bert = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, vocab_size=5
        )
    ).state_dict()
    ours = hf.bert.translate_hf_state_dict_to_smdistributed_bert(bert)
    assert ours["encoder.layer.0.output.layernorm.weight"] is bert["encoder.layer.0.output.LayerNorm.weight"]
    back = hf.bert.translate_state_dict_to_hf_bert(ours)
    assert all(torch.equal(back.pop(key), value) for key, value in bert.items())
    assert not back
    broken = dict(bert)
    del broken["encoder.layer.0.attention.self.key.bias"]
    with pytest.raises(smp.ConfigError, match=r"but no 'encoder\.layer\.0\.attention\.self\.key\.bias'"):
        hf.bert.translate_hf_state_dict_to_smdistributed_bert(broken)

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 5}
    llama = transformers.LlamaModel(
        transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=12)
    ).state_dict()
    back = hf.llama.translate_state_dict_to_hf_llama(hf.llama.translate_hf_state_dict_to_smdistributed_llama(llama))
    assert all(torch.equal(back.pop(key), value) for key, value in llama.items())

    neox = transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**sizes, intermediate_size=12)).state_dict()
    ours = hf.gptneox.translate_hf_state_dict_to_smdistributed_gptneox(neox, num_attention_heads=4)
    back = hf.gptneox.translate_state_dict_to_hf_gptneox(ours, num_attention_heads=4)
    assert all(torch.equal(back.pop(key), value) for key, value in neox.items())
    with pytest.raises(smp.ConfigError, match="the number of heads is needed"):
        hf.gptneox.translate_hf_state_dict_to_smdistributed_gptneox(neox)


def test_masks_become_masks_of_keys_where_the_layer_hides_the_rest() -> None:
    hidden = torch.zeros(2, 3, 4)
    shown = torch.tensor([[True, True, False], [True, True, True]])
    keys = torch.zeros(2, 1, 1, 3).masked_fill(~shown[:, None, None], MIN)
    causal = shown[:, None, None] & torch.ones(3, 3, dtype=torch.bool).tril()
    window = causal & torch.ones(3, 3, dtype=torch.bool).triu(-1)
    assert torch.equal(added_mask(None, hidden, 5), torch.zeros(2, 1, 1, 5))
    assert torch.equal(added_mask(shown.long(), hidden, 3), keys)
    assert torch.equal(added_mask(causal, hidden, 3, causal=True), keys)
    assert torch.equal(added_mask(window, hidden, 3, causal=True, window=2), keys)
    additive = torch.zeros(causal.shape).masked_fill(~causal, MIN)
    assert torch.equal(added_mask(additive, hidden, 3, causal=True), keys)
    assert torch.equal(added_mask(shown[:, None, None].expand(-1, -1, 3, -1), hidden, 3), keys)
    # What the layer does not hide by itself stays; so does what is no mask.
    assert torch.equal(added_mask(causal, hidden, 3), additive)
    assert torch.equal(added_mask(additive[1:], hidden, 3), additive[1:].expand(2, -1, -1, -1))
    bias = torch.randn(1, 4, 3, 3)
    assert torch.equal(added_mask(bias, hidden, 3), bias.expand(2, -1, -1, -1))
    with pytest.raises(smp.ConfigError, match=r"attention_mask is \(3,\); allowed: tensors of 2 or 4 dims"):
        added_mask(torch.ones(3), hidden, 3)


def test_whether_layers_return_tuples_is_read_from_their_code() -> None:
    class Plain(nn.Module):
        def forward(self, x: Any) -> Any:
            hidden = x + 1
            return hidden

    class Joined(nn.Module):
        def forward(self, x: Any) -> Any:
            outputs = (x,)
            if x is None:
                return x
            outputs = outputs + (x,)  # noqa: RUF005
            return outputs

    class Direct(nn.Module):
        def forward(self, x: Any) -> Any:
            return x, None

    assert [returns_tuple(cls) for cls in (Plain, Joined, Direct)] == [False, True, True]


def test_models_whose_initialization_scripts_leave_to_the_library_are_initialized_and_tied() -> None:
    for output in outputs_of_ranks(PROGRAM.with_name("left_initialization.py")):
        assert output == "initialized as the originals\n"
