"""Trainings of adapters of every kind, and of those beside base weights of few bits, by trainers of libraries."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.stacks.kinds import EVALUATED, WORDS, Over, arguments, llama

#: What each kind of adapters is told; the first ones are of low rank.
CONFIGURATIONS: dict[str, Callable[[Any], Any]] = {
    "dora": lambda peft: peft.LoraConfig(r=2, use_dora=True, **_TARGETS),
    "rslora": lambda peft: peft.LoraConfig(r=2, use_rslora=True, **_TARGETS),
    "modules": lambda peft: peft.LoraConfig(r=2, modules_to_save=["lm_head"], **_TARGETS),
    "tokens": lambda peft: peft.LoraConfig(r=2, trainable_token_indices={"embed_tokens": [3, 4, 5]}, **_TARGETS),
    "ia3": lambda peft: peft.IA3Config(feedforward_modules=["down_proj"], **{**_TARGETS, **_FEEDFORWARD}),
    "loha": lambda peft: peft.LoHaConfig(r=2, **_TARGETS),
    "lokr": lambda peft: peft.LoKrConfig(r=2, **_TARGETS),
    "vera": lambda peft: peft.VeraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "prompts": lambda peft: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
}
_TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
_FEEDFORWARD = {"target_modules": ["k_proj", "v_proj", "down_proj"]}
BITS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},  # what is large depends on the other rows
}


def quantization(kind: str) -> Any:
    """How a model is quantized."""
    if kind != "torchao":
        return transformers.BitsAndBytesConfig(**BITS[kind])
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


#: As wide as blocks of few bits are.
WIDTH = 64


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens, all of one length."""
    ids = torch.randint(len(WORDS) + 3, (count, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def by_trainer(over: Over, folder: Path, replicas: int, model: Any, kind: Any = transformers.Trainer) -> Any:
    """Train by a trainer of ``transformers``."""
    return over(kind)(
        model=model,
        args=transformers.TrainingArguments(**arguments(folder, replicas)),
        train_dataset=rows(40, 1),
        eval_dataset=rows(EVALUATED, 9),
    )


def of_kind(kind: str, over: Over, folder: Path, replicas: int) -> Any:
    """Train adapters of a kind."""
    import peft

    torch.manual_seed(11)
    return by_trainer(over, folder, replicas, peft.get_peft_model(llama(), CONFIGURATIONS[kind](peft)))


class Switching(transformers.Trainer):
    """Trains two adapters at once, and keeps both near to the model without them."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        given = {"input_ids": inputs["input_ids"]}
        with torch.no_grad(), model.disable_adapter():
            base = model(**given).logits
        model.set_adapter("other")
        others = model(**given).logits
        model.set_adapter("default")
        outputs = model(**given)
        loss = outputs.logits.sub(base).square().mean() + outputs.logits.sub(others).cos().mean()
        return (loss, outputs) if return_outputs else loss


def switched(over: Over, folder: Path, replicas: int) -> Any:
    """Train two adapters, one after another in each step."""
    import peft

    torch.manual_seed(11)
    config = peft.LoraConfig(r=2, init_lora_weights=False, **_TARGETS)
    model = peft.get_peft_model(llama(), config)
    model.add_adapter("other", config)
    model.set_requires_grad(["default", "other"])
    kept = {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    class Alike(Switching):
        """In one process, peft changes what is trained with what is active."""

        def compute_loss(self, model: Any, *given: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, *given, **more)
            if "RANK" not in os.environ:
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(kept[name])
            return loss

    return by_trainer(over, folder, replicas, model, Alike)


def few_bits(kind: str, over: Over, folder: Path, replicas: int) -> Any:
    """Train adapters of a model that is quantized while its ranks load it."""
    import bitsandbytes
    import peft
    from transformers import AutoModelForCausalLM

    # Where the processor has them, layers would round to bfloat16 in evaluations, in sums that depend on the batch.
    bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
    saved, delay = folder.parent.parent / "wide", contextlib.nullcontext
    if "RANK" not in os.environ:
        llama(hidden_size=WIDTH, intermediate_size=2 * WIDTH, initializer_range=0.1).save_pretrained(saved)
    elif kind != "torchao":
        import shardwright as smp

        delay = smp.delay_param_initialization  # type: ignore[assignment]
    with delay():
        base = AutoModelForCausalLM.from_pretrained(saved, quantization_config=quantization(kind), dtype=torch.float32)
    torch.manual_seed(11)
    config = peft.LoraConfig(r=2, init_lora_weights=False, **_TARGETS)
    return by_trainer(over, folder, replicas, peft.get_peft_model(base, config))


#: Those that are killed in a save too, and go on in a fresh job.
RESUMED = ("adapters-switched", "qlora-nf4", "qlora-int8")
KINDS: dict[str, Callable[[Over, Path, int], Any]] = {
    **{f"adapters-{kind}": functools.partial(of_kind, kind) for kind in CONFIGURATIONS},
    "adapters-switched": switched,
    **{f"qlora-{kind}": functools.partial(few_bits, kind) for kind in (*BITS, "torchao")},
}
