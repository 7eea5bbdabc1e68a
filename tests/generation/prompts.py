"""Learned prompts (prefix tuning of ``peft``), which are put into the model as a cache."""

from __future__ import annotations

import copy
from typing import Any

import peft
import shardwright as smp
import torch

from .models import VOCABULARY, beginnings, built


def prefixed(model: str) -> Any:
    """A model with learned prompts, the same on every rank."""
    kind = "SEQ_2_SEQ_LM" if model == "t5" else "CAUSAL_LM"
    torch.manual_seed(5)
    adapted: Any = peft.get_peft_model(built(model), peft.PrefixTuningConfig(task_type=kind, num_virtual_tokens=3))
    return adapted.double().eval()


def prompts_train(model: str, microbatches: int, trains_all: bool) -> None:
    """The gradients of the prompts, and of all weights if those are trained too, are those of one process."""
    plain = prefixed(model)
    if trains_all:
        plain.requires_grad_(True)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": microbatches})
    divided = smp.DistributedModel(copy.deepcopy(plain))
    inputs = beginnings(4)
    labels = torch.randint(3, VOCABULARY, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(6))

    @smp.step
    def train(model: Any, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(**inputs, labels=labels).loss
        model.backward(loss)
        return loss

    for _ in range(3):
        losses = train(divided, inputs, labels)
        expected = []
        for number in range(microbatches):
            part = {key: one.chunk(microbatches)[number] for key, one in inputs.items()}
            loss = plain(**part, labels=labels.chunk(microbatches)[number]).loss
            (loss / microbatches).backward()
            expected.append(loss.detach())
        assert (torch.stack(losses.outputs) - torch.stack(expected)).abs().max() < 1e-12
    named, compared = dict(plain.named_parameters()), 0
    for name, parameter in divided.local_named_parameters():
        assert (parameter.grad is None) == (named[name].grad is None), name
        if parameter.grad is not None:
            compared += 1
            assert (parameter.grad - named[name].grad).abs().max() < 1e-11, name
            assert parameter.grad.abs().max() > 1e-9, name
    assert compared or not trains_all
    smp.shutdown()


def prompts_generate(model: str, microbatches: int, own_step: bool) -> None:
    """A model with prompts generates what it does in one process."""
    plain = prefixed(model)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": microbatches})
    divided = smp.DistributedModel(copy.deepcopy(plain))
    inputs, options = beginnings(4), {"max_new_tokens": 6, "do_sample": False}
    inputs["input_ids"][2] = 2  # ends earlier than others

    @smp.step
    def generate(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
        made = model.generate(**inputs, **options)
        return torch.nn.functional.pad(made, (0, 16 - made.shape[1]))

    for _ in range(2):
        expected = plain.generate(**inputs, **options)
        if own_step:
            with torch.no_grad():
                found = generate(divided, inputs).concat()[:, : expected.shape[1]]
        else:
            found = divided.generate(**inputs, **options)
        assert torch.equal(found, expected), (found, expected)
    smp.shutdown()
