"""Calls of a model with a cache, by a script's own loops, beside one plain process."""

from __future__ import annotations

import copy
from typing import Any

import shardwright as smp
import torch
import transformers
from shardwright.caches import CacheTable
from shardwright.job.runtime import current_runtime

from .models import beginnings, built

TOKENS = 6


def _cache(kind: str, model: Any) -> Any:
    config = model.config
    if kind == "static":
        return transformers.StaticCache(config=config, max_cache_len=32)
    if kind == "lazy":
        return transformers.DynamicCache()
    if kind == "encoder-decoder":
        return transformers.EncoderDecoderCache(
            transformers.DynamicCache(config=config), transformers.DynamicCache(config=config)
        )
    return transformers.DynamicCache(config=config)


def greedy(model: Any, cache: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Go on with the likeliest token each; the tokens, and the scores of all."""
    mask, tokens, scores = inputs["attention_mask"], [], []
    given: dict[str, Any] = {"input_ids": inputs["input_ids"]}
    encoded = None
    for _ in range(TOKENS):
        if "decoder_input_ids" in inputs:
            given.pop("input_ids", None)
            decoder = given.pop("decoder", inputs["decoder_input_ids"])
            source = {"input_ids": inputs["input_ids"]} if encoded is None else {"encoder_outputs": encoded}
            out = model(**source, attention_mask=mask, decoder_input_ids=decoder, past_key_values=cache, use_cache=True)
            encoded = (out.encoder_last_hidden_state,)
        else:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -given["input_ids"].shape[1] :]
            out = model(**given, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        scores.append(out.logits[:, -1])
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token)
        if "decoder_input_ids" in inputs:
            given["decoder"] = token
        else:
            given["input_ids"] = token
            mask = torch.cat([mask, torch.ones_like(token)], 1)
    assert cache.get_seq_length() == TOKENS + inputs.get("decoder_input_ids", inputs["input_ids"]).shape[1] - 1
    return torch.cat(tokens, 1), torch.stack(scores, 1)


def own_loop(model: str, cache: str, microbatches: int) -> None:
    """A loop in the step function that makes the cache, or lets the model make it."""
    plain = built(model)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": microbatches})
    divided = smp.DistributedModel(copy.deepcopy(plain))
    inputs: dict[str, torch.Tensor] = beginnings()
    if cache == "encoder-decoder":
        inputs["decoder_input_ids"] = torch.tensor([[0, 7]]).repeat(inputs["input_ids"].shape[0], 1)

    @smp.step
    def generate(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
        return greedy(model, _cache(cache, plain) if cache != "own" else None, inputs)

    with torch.no_grad():
        expected = greedy(plain, _cache(cache, plain) if cache != "own" else None, inputs)
        for _ in range(2):
            tokens, scores = generate(divided, inputs)
            assert torch.equal(tokens.concat(), expected[0]), (tokens.concat(), expected[0])
            assert (scores.concat() - expected[1]).abs().max() < 1e-12
            assert not current_runtime()[CacheTable].ids
    ranks = {divided.placement.ownership.decision.modules[name] for name in _layers(divided)}
    assert ranks == {0, 1}, ranks
    smp.shutdown()


def _layers(model: Any) -> list[str]:
    return [
        name for name, module in model.module.named_modules() if isinstance(getattr(module, "layer_idx", None), int)
    ]
