"""Small models with adapters, which layers of two ranks make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, ROWS, TOKENS = 6, 4, 7
#: The layers of a model of ``transformers`` that have adapters.
TARGETS = ["q_proj", "down_proj"]


class Net(nn.Module):
    """Layers of which the last ones are on another rank, with a table and a normalization before them."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.checkpoints = checkpoints

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = self.norm(self.table(inputs))
        for layer in (self.first, self.second, self.third):
            ran = checkpoint(layer, values, use_reentrant=False) if self.checkpoints else layer(values)
            values = torch.tanh(ran)
        outputs: torch.Tensor = self.head(values)
        return outputs


def far_modules(model: Any) -> list[nn.Module]:
    """The modules that the second rank runs."""
    net = model.get_base_model()
    return [net.second, net.third, net.head] if isinstance(net, Net) else [net.model.layers[1]]


def lora(**more: Any) -> peft.PeftConfig:
    """Low-rank adapters that change what the model computes from the beginning."""
    return peft.LoraConfig(
        **{"r": 2, "target_modules": ["first", "second", "third"], "init_lora_weights": False, **more}
    )


def adapted(config: Callable[[], peft.PeftConfig] = lora, *names: str, **given: Any) -> Any:
    """A model with adapters ``default`` and those of further names, all of which are trained."""
    torch.manual_seed(4)
    model = peft.get_peft_model(Net(**given), config())  # type: ignore[arg-type]
    for name in names:
        model.add_adapter(name, config())
    model.double()
    drawn = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or any(f".{other}" in name for other in names):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=drawn, dtype=parameter.dtype)
    if names:
        model.set_requires_grad(["default", *names])
    return model


def language_model(*names: str, checkpoints: bool = False, adapters: peft.PeftConfig | None = None) -> Any:
    """A model of ``transformers`` with adapters, of low rank if nothing else is said."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    base = LlamaForCausalLM(config)
    if checkpoints:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    adapters = adapters or peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False)
    model = peft.get_peft_model(base, adapters)
    for name in names:
        model.add_adapter(name, adapters)
    model.set_requires_grad(["default", *names])
    return model.double()


def prompts(*names: str) -> Any:
    """A model of ``transformers`` with prompts that are trained."""
    base = language_model().unload()
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(base, config)
    for name in names:
        model.add_adapter(name, config)
    return model.double()


def batch(number: int) -> torch.Tensor:
    """Rows of tokens."""
    return torch.randint(TOKENS, (ROWS, 5), generator=torch.Generator().manual_seed(number))
