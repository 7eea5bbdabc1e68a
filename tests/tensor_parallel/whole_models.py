"""One of the tp ranks of a job: ``DistributedTransformerLMHead`` with weights of language models of ``transformers``.

``whole_models.py TP OPTIMIZE``
"""

from __future__ import annotations

import sys
from typing import Any

import shardwright as smp
import torch
import transformers
from cases import close
from torch import nn

VOCABULARY, POSITIONS, WIDTH, LENGTH = 30, 16, 16, 6
OURS: dict[str, Any] = {
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_size": 4,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "num_positions": POSITIONS,
    "activation": "gelu_new",
    "causal_mask_size": POSITIONS,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "pre_layernorm": True,
    "post_layernorm": False,
    "final_layernorm": True,
}
NEO = {"query_key_value_bias": False, "scale": 1.0, "attention_in_fp32": True, "window_sizes": [None, 3]}


def gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        n_inner=24,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def gptneo() -> nn.Module:
    config = transformers.GPTNeoConfig(
        hidden_size=WIDTH,
        num_layers=2,
        num_heads=4,
        intermediate_size=24,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        attention_types=[[["global", "local"], 1]],
        window_size=3,
        embed_dropout=0.0,
    )
    return transformers.GPTNeoForCausalLM(config)


def check(name: str, whole: Any, options: dict[str, Any], exact: float) -> None:
    whole.double()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    module = getattr(smp.nn.huggingface, name)
    state = whole.state_dict()
    translated = getattr(module, f"translate_hf_state_dict_to_smdistributed_{name}_lm_head")(state)
    model = smp.DistributedModel(smp.nn.DistributedTransformerLMHead(**OURS, **options, dtype=torch.float64))
    assert model.load_state_dict(translated) == ([], [])

    generator = torch.Generator().manual_seed(smp.dp_rank())
    ids = torch.randint(0, VOCABULARY, (2 + smp.dp_rank(), LENGTH), generator=generator)
    crossing: dict[str, Any] = {}
    between: tuple[Any, ...] = ()
    if options.get("add_cross_attention"):
        crossing["encoder_hidden_states"] = torch.randn(len(ids), 5, WIDTH, dtype=torch.float64, generator=generator)
        between = (crossing["encoder_hidden_states"], None)
    with torch.no_grad():
        expected = whole(ids, labels=ids, use_cache=False, **crossing)
        close(model((ids, None, None, None, *between)), expected.logits, f"logits of {name}", exact)
        loss = model((ids, None, None, None, *between, ids))
        # transformers makes logits single for it.
        close(loss.float(), expected.loss.float(), f"loss of {name}", 1e-5)
        by_hand = nn.functional.cross_entropy(expected.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        close(loss, by_hand, f"loss of {name}", exact)

    back = getattr(module, f"translate_state_dict_to_hf_{name}_lm_head")(model.state_dict())
    assert back.keys() == state.keys(), back.keys() ^ state.keys()
    for key, tensor in state.items():
        assert torch.equal(back[key], tensor), key
    whole.load_state_dict(back)


def main() -> None:
    smp.init({"tensor_parallel_degree": int(sys.argv[1]), "ddp": True, "optimize": sys.argv[2]})
    torch.manual_seed(0)
    check("gpt2", gpt2(), {}, 1e-10)
    check("gpt2", gpt2(add_cross_attention=True), {"add_cross_attention": True}, 1e-10)
    # It computes attention in single precision itself.
    check("gptneo", gptneo(), NEO, 2e-5)
    print("whole models hold")
    smp.shutdown()


if __name__ == "__main__":
    main()
