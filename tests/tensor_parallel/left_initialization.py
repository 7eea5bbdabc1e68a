"""One of the tp ranks of a job whose script leaves the initialization of models of ``transformers`` to the library."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM
from transformers.modeling_utils import PreTrainedModel

SIZES = {"hidden_size": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 96, "max_position_embeddings": 32}
MODELS: list[tuple[type[Any], Any]] = [
    (GPT2LMHeadModel, GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=32)),
    (GPTNeoForCausalLM, GPTNeoConfig(**SIZES, attention_types=[[["global", "local"], 1]], window_size=8)),
]
hf = smp.nn.huggingface
TRANSLATORS: list[Any] = [
    hf.gpt2.translate_state_dict_to_hf_gpt2,
    hf.gptneo.translate_state_dict_to_hf_gptneo,
]
INITIALIZE = PreTrainedModel.init_weights


def made(kind: type[Any], config: Any, *, delayed: bool = False) -> nn.Module:
    """A model, as the examples make it."""
    torch.manual_seed(5)
    with smp.model_creation(tensor_parallelism=True), smp.delay_param_initialization(delayed):
        model: nn.Module = kind._from_config(config)
    return model


def main() -> None:
    """Compare weights with those of the same model as ``transformers`` initializes it."""
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    for (kind, config), translated in zip(MODELS, TRANSLATORS, strict=True):
        torch.manual_seed(5)
        plain = kind._from_config(config)
        wanted = plain.state_dict()
        for nothing in (lambda self: None, lambda *args, **kwargs: None):
            for delayed in (False, True):
                PreTrainedModel.init_weights = nothing
                try:
                    model = smp.DistributedModel(made(kind, config, delayed=delayed))
                finally:
                    PreTrainedModel.init_weights = INITIALIZE
                inner = model.get_module()
                assert any(isinstance(part, smp.nn.DistributedModule) for part in inner.modules())
                assert inner.lm_head.weight is inner.transformer.wte.weight, "the head is not tied"
                assert "init_weights" not in inner.__dict__
                found = translated(model.state_dict())
                for name, value in wanted.items():
                    assert torch.equal(found[name], value), name
                    if value.dim() == 2:
                        assert value.std() < 0.03, name
                del model
        PreTrainedModel.init_weights = lambda self: self.apply(ones)
        try:
            assert all((each == 1).all() for each in made(kind, config).parameters()), "the script's own function"
            with smp.model_creation(tensor_parallelism=False):
                assert all((each == 1).all() for each in kind._from_config(config).parameters())
        finally:
            PreTrainedModel.init_weights = INITIALIZE
    print("initialized as the originals")


def ones(module: nn.Module) -> None:
    """Initialize a module, as a script might."""
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


if __name__ == "__main__":
    main()
