"""What generates: GPT-2 of its real size with random weights, and a small one whose blocks sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

BATCH, PROMPT, MICROBATCHES = 8, 16, 4
#: What a sleeping block takes for a microbatch; for the whole batch it takes as many times as long.
SECONDS = 0.01
SEED = 1


class SleepingBlock(GPT2Block):
    """Takes as long as it has sequences."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden_states = hidden_states + 0  # first: what another rank still computes is waited for here
        time.sleep(SECONDS * hidden_states.shape[0] * MICROBATCHES / BATCH)
        return super().forward(hidden_states, *args, **kwargs)


def _config(**sizes: Any) -> GPT2Config:
    return GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0)


def _sleeping() -> GPT2LMHeadModel:
    model = GPT2LMHeadModel(_config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=512))
    for index in range(2):
        block = SleepingBlock(model.config, layer_idx=index)
        block.load_state_dict(model.transformer.h[index].state_dict())
        model.transformer.h[index] = block
    return model


_MODELS: dict[str, Callable[[], GPT2LMHeadModel]] = {
    "sleeping": _sleeping,
    "gpt2": lambda: GPT2LMHeadModel(_config()),
}


def made(kind: str) -> GPT2LMHeadModel:
    """The model, the same in every process."""
    torch.manual_seed(SEED)
    return _MODELS[kind]().eval()


def beginnings(model: GPT2LMHeadModel) -> torch.Tensor:
    """Tokens to go on from."""
    return torch.randint(1, model.config.vocab_size, (BATCH, PROMPT), generator=torch.Generator().manual_seed(SEED))


class Watch:
    """Notes when each token of each microbatch was begun."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        """Of a model whose embedding this process has."""
        self.times: list[float] = []
        model.transformer.wte.register_forward_pre_hook(lambda *_: self.times.append(time.perf_counter()))

    def growth(self) -> float:
        """How many times as long the last quarter of the tokens takes as the first, which the first token begins."""
        quarter = len(self.times) // 4
        times = self.times[MICROBATCHES:]  # computing the beginnings is another matter
        return (times[-1] - times[-quarter]) / (times[quarter - 1] - times[0])


def generated(model: Any, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, float, float]:
    """The likeliest tokens, how many seconds they took, and how many of a processor in this process."""
    began, computed = time.perf_counter(), time.process_time()
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return found, time.perf_counter() - began, time.process_time() - computed
