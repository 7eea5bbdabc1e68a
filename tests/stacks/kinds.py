"""Trainings by the trainers of TRL and sentence-transformers, with random weights, and a tokenizer and data made here.

Each is the same in one plain process and over ranks: ``over`` makes the classes that are used of those of the library.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

Over = Callable[[Any], Any]
WORDS = ["sky", "sea", "red", "blue", "is", "was", "the", "a", "deep", "old", "small", "round", "sun", "moon"]
BATCH, STEPS = 8, 3
#: Samples of an evaluation, whose last batch no number of replicas fills.
EVALUATED = 13


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sentences(count: int, seed: int, fewest: int = 2, most: int = 8) -> list[str]:
    """Sentences of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    lengths = [fewest + number(most - fewest + 1) for _ in range(count)]
    return [" ".join(WORDS[number(len(WORDS))] for _ in range(length)) for length in lengths]


def llama(kind: Any = LlamaForCausalLM, seed: int = 3, **more: Any) -> Any:
    """A small model, the same in every process."""
    torch.manual_seed(seed)
    given = {
        "vocab_size": len(WORDS) + 3,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 1,
        "initializer_range": 0.3,
    }
    return kind(LlamaConfig(**{**given, **more}))


def lora(**more: Any) -> Any:
    """Adapters that are no identity at first."""
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)


def arguments(folder: Path, replicas: int, **more: Any) -> dict[str, Any]:
    """What all arguments have: batches of one size over all replicas."""
    given = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": BATCH // replicas,
        "per_device_eval_batch_size": BATCH // replicas,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1.0,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "seed": 7,
    }
    return {**given, **more}


def dataset(**columns: list[Any]) -> Any:
    """A data set with these columns."""
    from datasets import Dataset

    return Dataset.from_dict(columns)


def pairs(count: int = 40) -> Any:
    """Prompts, each with an answer that was chosen and one that was rejected."""
    return dataset(
        prompt=sentences(count, 1),
        chosen=[f" {one}" for one in sentences(count, 2)],
        rejected=[f" {one}" for one in sentences(count, 4)],
    )


def sft(over: Over, folder: Path, replicas: int, peft: Any = None, **more: Any) -> Any:
    """Supervised fine-tuning."""
    from trl import SFTConfig, SFTTrainer

    return over(SFTTrainer)(
        model=llama(),
        args=SFTConfig(**arguments(folder, replicas, **{"max_length": 32, **more})),
        train_dataset=dataset(text=sentences(160, 1, most=20)),
        eval_dataset=dataset(text=sentences(EVALUATED, 9, most=20)),
        processing_class=tokenizer(),
        peft_config=peft,
    )


def dpo(over: Over, folder: Path, replicas: int, peft: Any = None, **more: Any) -> Any:
    """Direct preference optimization, with arguments by position."""
    from trl import DPOConfig, DPOTrainer

    given = DPOConfig(**arguments(folder, replicas, max_length=32, **more))
    trainer = over(DPOTrainer)
    if peft is not None:
        return trainer(
            llama(), None, given, train_dataset=pairs(), eval_dataset=pairs(EVALUATED), processing_class=tokenizer(),
            peft_config=peft,
        )  # fmt: skip
    reference = llama(seed=5)
    return trainer(llama(), reference, given, None, pairs(), pairs(EVALUATED), tokenizer())


def reward(over: Over, folder: Path, replicas: int, **more: Any) -> Any:
    """A reward model."""
    from trl import RewardConfig, RewardTrainer

    return over(RewardTrainer)(
        model=llama(LlamaForSequenceClassification, num_labels=1),
        args=RewardConfig(**arguments(folder, replicas, max_length=32, **more)),
        train_dataset=pairs(),
        eval_dataset=pairs(EVALUATED),
        processing_class=tokenizer(),
    )


def kto(over: Over, folder: Path, replicas: int, **more: Any) -> Any:
    """Preferences without pairs."""
    from trl import KTOConfig, KTOTrainer

    def answers(count: int) -> Any:
        return dataset(
            prompt=sentences(count, 1),
            completion=[f" {one}" for one in sentences(count, 2)],
            label=[bool(one % 3) for one in range(count)],
        )

    return over(KTOTrainer)(
        model=llama(),
        ref_model=llama(seed=5),
        args=KTOConfig(**arguments(folder, replicas, max_length=32, **more)),
        train_dataset=answers(40),
        eval_dataset=answers(EVALUATED),
        processing_class=tokenizer(),
    )


def lengths(completions: list[str], **_: Any) -> list[float]:
    """What a completion is worth: by its words, without a model."""
    return [float(len(set(one.split()))) - 0.1 * len(one) for one in completions]


def _prompts(count: int) -> Any:
    return dataset(prompt=sentences(count, 1, most=4))


def online(name: str, over: Over, folder: Path, replicas: int, peft: Any = None, **more: Any) -> Any:
    """Completions that the model generates while it is trained, by GRPO or RLOO."""
    import trl

    saved = folder.parent.parent / "base"  # from which the reference is read
    if "RANK" not in os.environ:  # the plain run is the first
        llama().save_pretrained(saved)
    given = arguments(folder, replicas, num_generations=4, max_completion_length=6, beta=0.1, **more)
    return over(getattr(trl, f"{name}Trainer"))(
        str(saved) if peft is None else llama(),
        lengths,
        over(getattr(trl, f"{name}Config"))(**given),
        _prompts(40),
        _prompts(8),
        tokenizer(),
        peft_config=peft,
    )


def given_completions(over: Over, folder: Path, replicas: int) -> Any:
    """GRPO by a script's own subclass, whose completions do not depend on the division of prompts over replicas."""
    from trl import GRPOConfig, GRPOTrainer

    class Given(GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *others: Any) -> Any:
            first = [7 * sum(prompt) + 5 * (number % 4) for number, prompt in enumerate(prompt_ids)]
            return [[3 + (one + place) % len(WORDS) for place in range(4)] for one in first], None

    given = arguments(folder, replicas, num_generations=4, max_completion_length=6)
    return over(Given)(llama(), lengths, over(GRPOConfig)(**given), _prompts(40), _prompts(8), tokenizer())


def of_sentences(loss: str, over: Over, folder: Path, replicas: int) -> Any:
    """Embeddings of sentences, by a loss with negatives from the batch, or of each row."""
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses, models
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from transformers import BertConfig, BertModel

    saved = folder.parent.parent / "bert"
    if "RANK" not in os.environ:
        torch.manual_seed(3)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        BertModel(BertConfig(vocab_size=len(WORDS) + 3, **sizes, **none, initializer_range=0.3)).save_pretrained(saved)
        tokenizer().save_pretrained(saved)
    words = models.Transformer(str(saved))
    model = SentenceTransformer(modules=[words, models.Pooling(16)], device="cpu")

    def both(count: int) -> Any:
        scores = (
            {} if loss == "MultipleNegativesRankingLoss" else {"score": [number % 7 / 7 for number in range(count)]}
        )
        return dataset(first=sentences(count, 1), second=sentences(count, 2), **scores)

    given = {name: one for name, one in arguments(folder, replicas).items() if name != "gradient_checkpointing"}
    return over(SentenceTransformerTrainer)(
        model=model,
        args=over(Arguments)(**given),
        train_dataset=both(40),
        eval_dataset=both(EVALUATED),
        loss=getattr(losses, loss)(model),
    )


#: Trainings in which a replica draws, or averages over what it has of a batch, what one process does not.
ONE_REPLICA = {"kto", "grpo", "grpo-lora", "rloo", "dpo-several", "negatives"}
#: Those that are killed in a save too, and go on in a fresh job from the newest checkpoint that is complete.
RESUMED = ("sft-lora", "sft-grouped", "dpo", "reward", "grpo-given")
KINDS: dict[str, Callable[[Over, Path, int], Any]] = {
    "sft": sft,
    "sft-accumulated": functools.partial(sft, gradient_accumulation_steps=2),
    "sft-lora": lambda *given: sft(*given, peft=lora()),
    "sft-packed": functools.partial(sft, packing=True),
    "sft-wrapped": functools.partial(sft, packing=True, packing_strategy="wrapped"),
    "sft-unpadded": functools.partial(sft, padding_free=True, max_length=None),
    "sft-grouped": functools.partial(sft, train_sampling_strategy="group_by_length"),
    "sft-dft": functools.partial(sft, loss_type="dft"),
    "sft-smoothed": functools.partial(sft, label_smoothing_factor=0.1),
    "dpo": dpo,
    "dpo-several": functools.partial(dpo, loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    "dpo-lora": lambda *given: dpo(*given, peft=lora()),
    "dpo-lora-checkpointed": lambda *given: dpo(*given, peft=lora(), gradient_checkpointing=True),
    "reward": reward,
    "kto": kto,
    "kto-without-kl": functools.partial(kto, loss_type="apo_zero_unpaired"),
    "grpo-given": given_completions,
    "grpo": functools.partial(online, "GRPO"),
    "grpo-lora": lambda *given: online("GRPO", *given, peft=lora(), gradient_checkpointing=True),
    "rloo": functools.partial(online, "RLOO"),
    "negatives": functools.partial(of_sentences, "MultipleNegativesRankingLoss"),
    "cosines": functools.partial(of_sentences, "CosineSimilarityLoss"),
}
