"""One of the tp ranks of a job: small models of ``transformers`` with divided layers, beside the same models whole."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import shardwright as smp
import torch
import transformers
from cases import close, random
from shardwright.nn.huggingface.layer import Replaced
from shardwright.nn.huggingface.mixtral import DistributedExperts
from shardwright.tensor_parallel.module import named_shardings
from shardwright.tensor_parallel.sharding import Sharding
from torch import nn

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 30}
LONG = {**SIZES, "max_position_embeddings": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_GPT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GROUPED = {**LONG, "intermediate_size": 24, "num_key_value_heads": 2}
#: Where ``transformers`` itself computes in single precision.
SINGLE = 2e-5


def models() -> Iterator[tuple[str, str, Callable[[], nn.Module], float]]:
    """The name of a model's module here, its kind of inputs, the model, and how exact it is itself."""
    t = transformers
    gpt2 = {**LONG, **NO_GPT_DROPOUT}
    yield "gpt2", "ids", lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2)), 1e-10
    yield (
        "gpt2",
        "cross",
        lambda: t.GPT2LMHeadModel(
            t.GPT2Config(**gpt2, add_cross_attention=True, scale_attn_by_inverse_layer_idx=True, n_inner=24)
        ),
        1e-10,
    )
    bert = {**LONG, **NO_DROPOUT, "intermediate_size": 24}
    yield "bert", "ids", lambda: t.BertModel(t.BertConfig(**bert)), 1e-10
    yield (
        "bert",
        "cross",
        lambda: t.BertModel(t.BertConfig(**bert, is_decoder=True, add_cross_attention=True)),
        1e-10,
    )
    yield "roberta", "ids", lambda: t.RobertaModel(t.RobertaConfig(**{**bert, "max_position_embeddings": 20})), 1e-10
    yield "llama", "ids", lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED, attention_bias=True)), SINGLE
    yield "mistral", "ids", lambda: t.MistralModel(t.MistralConfig(**GROUPED, head_dim=8, sliding_window=3)), SINGLE
    yield "qwen3", "ids", lambda: t.Qwen3Model(t.Qwen3Config(**GROUPED, head_dim=8)), SINGLE
    yield (
        "mixtral",
        "ids",
        lambda: t.MixtralModel(t.MixtralConfig(**GROUPED, num_local_experts=2, experts_implementation="eager")),
        SINGLE,
    )
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 30, "dropout_rate": 0.0}
    for projection in ("relu", "gated-gelu"):
        yield "t5", "both", lambda kind=projection: t.T5Model(t.T5Config(**t5, feed_forward_proj=kind)), SINGLE
    neox = {**LONG, "intermediate_size": 24, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    for parallel in (True, False):
        yield (
            "gptneox",
            "ids",
            lambda parallel=parallel: t.GPTNeoXModel(t.GPTNeoXConfig(**neox, use_parallel_residual=parallel)),
            SINGLE,
        )
    yield "gptj", "ids", lambda: t.GPTJModel(t.GPTJConfig(**gpt2, rotary_dim=2)), SINGLE
    neo = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 30, "max_position_embeddings": 16}
    neo = {**neo, "attention_types": [[["global", "local"], 1]], "window_size": 3}
    yield "gptneo", "ids", lambda: t.GPTNeoModel(t.GPTNeoConfig(**neo)), SINGLE
    vit = {**NO_DROPOUT, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
    yield "vit", "pixels", lambda: t.ViTModel(t.ViTConfig(**vit, image_size=8, patch_size=4)), 1e-10


def inputs_of(kind: str, rank: int) -> dict[str, Any]:
    """Of a rank; only odd ranks' samples are padded."""
    batch = 1 + rank
    if kind == "pixels":
        return {"pixel_values": random(rank, (batch, 3, 8, 8))}
    ids = torch.randint(3, 30, (batch, 6), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones(batch, 6, dtype=torch.int64)
    if rank % 2:
        mask[0, 4:] = 0
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if kind == "both":
        given["decoder_input_ids"] = ids[:, 1:]
        given["decoder_attention_mask"] = mask[:, 1:]
    if kind == "cross":
        given["encoder_hidden_states"] = random(50 + rank, (batch, 5, 16))
        given["encoder_attention_mask"] = torch.ones(batch, 5, dtype=torch.int64)
        given["encoder_attention_mask"][0, 3 + rank :] = 0
    return given


def output_of(model: Any, given: dict[str, Any]) -> torch.Tensor:
    output: torch.Tensor = model(**given)[0]
    return output * mask(given)


def mask(given: dict[str, Any]) -> torch.Tensor | float:
    """Zero at padded positions, whose values are of no account."""
    shown = given.get("decoder_attention_mask", given.get("attention_mask"))
    return 1.0 if shown is None else shown.unsqueeze(-1)


def check(name: str, kind: str, make: Callable[[], nn.Module], exact: float) -> None:
    n, rank = smp.tp_size(), smp.tp_rank()
    torch.manual_seed(0)
    with smp.tensor_parallelism():
        whole = make().double()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    whole.config.use_cache = False
    of_model = getattr(smp.nn.huggingface, name)
    blocks = {block.cls: block for block in vars(of_model).values() if isinstance(block, Replaced)}
    layer_names = [one for one, module in whole.named_modules() if type(module).__name__ in blocks]
    assert {type(whole.get_submodule(one)).__name__ for one in layer_names} == blocks.keys()
    model = smp.DistributedModel(copy.deepcopy(whole))
    for layer_name in layer_names:
        assert isinstance(model.module.get_submodule(layer_name), smp.nn.DistributedModule), layer_name
    given = [inputs_of(kind, r) for r in range(n)]
    expected = [output_of(whole, one) for one in given]
    weights = [random(20 + r, one.shape) for r, one in enumerate(expected)]
    sum((w * one).sum() for w, one in zip(weights, expected, strict=True)).backward()
    if name in ("gpt2", "llama") and kind == "ids":
        with pytest.raises(smp.ConfigError, match=r"a key/value cache, which it does not know; pass use_cache=False"):
            model(**given[rank], use_cache=True)
        layer = model.module.get_submodule(layer_names[0])
        with pytest.raises(smp.ConfigError, match="the call has of_another_name, a key/value cache"):
            layer(torch.zeros(1, 2, 16).double(), of_another_name=transformers.DynamicCache())
        with pytest.raises(smp.ConfigError, match="attention weights as output, which it does not know"):
            model(**given[rank], output_attentions=True)
        states = model(**given[rank], output_hidden_states=True).hidden_states
        wanted = whole(**given[rank], output_hidden_states=True).hidden_states
        assert len(states) == len(wanted) == 3
        close(states[1] * mask(given[rank]), wanted[1] * mask(given[rank]), f"hidden states of {name}", exact)
    if name == "t5":
        with pytest.raises(smp.ConfigError, match="hidden_states are float16, which T5 clamps after each block"):
            model.module.encoder.block[0](torch.zeros(1, 2, 16, dtype=torch.float16))
        with pytest.raises(smp.ConfigError, match="encoder_hidden_states is None; expected a tensor, as the layer has"):
            model.module.decoder.block[0](torch.zeros(1, 2, 16))
        with pytest.raises(smp.ConfigError, match="is a tensor; expected None, as the layer has no cross-attention"):
            model.module.encoder.block[0](torch.zeros(1, 2, 16), encoder_hidden_states=torch.zeros(1, 2, 16))
    if name == "mixtral":
        with pytest.raises(smp.ConfigError, match=r"a size of 3 in dim 0 .* does not divide"):
            DistributedExperts(3, 16, 24)
        with pytest.raises(smp.ConfigError, match=r"top_k_weights has shape \(5, 2\) on tp rank 0; expected \[5, 1\]"):
            DistributedExperts(2, 16, 24)(torch.zeros(5, 16), torch.zeros(5, 1, dtype=torch.int64), torch.zeros(5, 2))
    output = output_of(model, given[rank])
    close(output, expected[rank], f"output of {name}", exact)
    (weights[rank] * output).sum().backward()
    for layer_name in layer_names:
        original = whole.get_submodule(layer_name)
        for parameter in original.parameters():
            parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        layer = model.module.get_submodule(layer_name)
        shardings = named_shardings(layer)
        gradients = blocks[type(original).__name__].weights_of(original)
        parameters = dict(layer.named_parameters())
        assert gradients.keys() == {*shardings, *parameters}, (name, gradients.keys() ^ shardings.keys())
        for own, parameter in parameters.items():
            if own not in shardings:  # meets this rank's own samples: the sum over ranks is that of all
                torch.distributed.all_reduce(parameter.grad)
            sharding: Sharding = shardings.get(own, Sharding())
            close(parameter.grad, sharding.shard(gradients[own], rank, n), f"gradient of {name} {own}", exact)


def main() -> None:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "optimize": sys.argv[1]})
    for name, kind, make, exact in models():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        check(name, kind, make, exact)
        print(f"{name} {kind} holds")
    smp.shutdown()


if __name__ == "__main__":
    main()
