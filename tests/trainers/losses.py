"""Losses that people train on, each with what Trainer is given for it; the same in one process and over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, LENGTH, SAMPLES = 32, 16, 8, 32

FLOAT32 = 1e-7

Sample = dict[str, Any]
Collator = Callable[[Sequence[Sample]], dict[str, Any]]


@dataclass(frozen=True)
class Loss:
    """What a training is of.

    Attributes:
        build: Makes the model.
        sample: Makes a sample.
        trainer: Makes a class of trainers from that which trains.
        given: What the trainer is given besides.
        adds_up: Whether the loss of a batch is a sum over its labels, or a mean over them or over its rows, also with
            something added that does not depend on its rows. Others are exact in one microbatch on one replica only.
        answers: Whether it can be computed without gradients, so that it can be asked what microbatches make of it.
        is_of_replicas: Whether replicas compute what one process or DDP does, from the first batch to the last.
        rounding: The largest relative difference of weights; more where transformers computes the loss in float32.
    """

    build: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Sample]
    trainer: Callable[[type], type] = lambda base: base
    given: dict[str, Any] = field(default_factory=dict)
    adds_up: bool = True
    answers: bool = True
    is_of_replicas: bool = True
    rounding: float = 1e-12


# --- models


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, loss_type="ForCausalLM", bos_token_id=1, eos_token_id=1))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=LENGTH))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            router_aux_loss_coef=0.5,
            output_router_logits=True,
            max_position_embeddings=LENGTH,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": WIDTH, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))


class Penalized(nn.Module):
    """A module whose output comes with the size of its weights, as adapters that are kept orthogonal do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(inputs)), self.linear.weight.square().sum()


class Classifier(nn.Module):
    """A model of no library, which takes no arguments of losses, unless it takes any."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Penalized(), Penalized(), nn.Linear(WIDTH, 4)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden, size = self.first(inputs)
        hidden, other = self.second(hidden)
        logits, results = self.last(hidden), {}
        if labels is not None:
            results["loss"] = functional.cross_entropy(logits, labels) + size + other
        return {**results, "logits": logits, "hidden": hidden}


class TakesNumber(Classifier):
    """Its loss is a sum divided by the number that it is told, with something added."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        hidden, size = self.first(inputs)
        hidden, other = self.second(hidden)
        logits = self.last(hidden)
        total = functional.cross_entropy(logits, labels, reduction="sum")
        number = kwargs.get("num_items_in_batch")
        return {"loss": total / (labels.ne(-100).sum() if number is None else number) + size + other, "logits": logits}


class OfRows(Classifier):
    """Its own loss is a mean over rows, each of which has several labels."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits, losses = super().forward(inputs)["logits"], []
        for row, own in zip(logits, labels, strict=True):
            losses.append(functional.cross_entropy(row.expand(len(own), -1), own))
        return {"loss": torch.stack(losses).mean(), "logits": logits}


class Sum(Classifier):
    """Its own loss is a sum, which it divides by nothing."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = super().forward(inputs)["logits"]
        if labels is None:
            return {"logits": logits}
        return {"loss": 0.01 * functional.cross_entropy(logits, labels, reduction="sum"), "logits": logits}


# --- samples


def _text(generator: torch.Generator) -> Sample:
    """Padded text: samples have different numbers of labels."""
    length = int(torch.randint(3, LENGTH + 1, (), generator=generator))
    ids = torch.randint(2, VOCABULARY, (LENGTH,), generator=generator)
    mask = torch.arange(LENGTH) < length
    return {
        "input_ids": torch.where(mask, ids, 0),
        "attention_mask": mask.long(),
        "labels": torch.where(mask, ids, -100),
    }


def _mostly_whole(generator: torch.Generator) -> Sample:
    """Text that is seldom padded: microbatches have as many labels as one another, and another has fewer."""
    return next((one for one in (_text(generator) for _ in range(4)) if bool(one["labels"][-1] >= 0)), _text(generator))


def _point(generator: torch.Generator) -> Sample:
    """A vector and its class; some have none."""
    label = int(torch.randint(5, (), generator=generator))
    inputs = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    return {"inputs": inputs, "labels": torch.tensor(label if label < 4 else -100)}


def _all_labelled(generator: torch.Generator) -> Sample:
    return {**_point(generator), "labels": torch.randint(4, (), generator=generator)}


def _point_of_many(generator: torch.Generator) -> Sample:
    """A vector with several classes, of which some are none."""
    labels = torch.randint(4, (LENGTH,), generator=generator)
    labels[int(torch.randint(1, LENGTH + 1, (), generator=generator)) :] = -100
    return {**_point(generator), "labels": labels}


# --- losses


def _tokens(outputs: Any, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    logits, wanted = outputs["logits"][:, :-1], labels[:, 1:]
    return functional.cross_entropy(logits.transpose(1, 2), wanted, reduction=reduction)


#: What models are given; the rest is for losses.
_TAKEN = {"inputs", "input_ids", "attention_mask"}


def overriding(loss: Callable[[Any, Any, Any], torch.Tensor]) -> Callable[[type], type]:
    """A class of trainers with this loss of outputs, inputs and the number by which it divides sums.

    As in transformers, gradients are averaged over the ranks with different samples, and sums are multiplied by their
    number.
    """

    def made(base: type) -> type:
        class Own(base):  # type: ignore[misc, valid-type]
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                outputs = model(**{name: value for name, value in inputs.items() if name in _TAKEN})
                number = None if num_items_in_batch is None else num_items_in_batch / self.accelerator.num_processes
                value = loss(outputs, inputs, number)
                return (value, outputs) if return_outputs else value

        return Own

    return made


def _mean(outputs: Any, inputs: Any, number: Any) -> torch.Tensor:
    return _tokens(outputs, inputs["labels"], "mean")


def _divided_sum(outputs: Any, inputs: Any, number: Any) -> torch.Tensor:
    return _tokens(outputs, inputs["labels"], "sum") / number


def _sum(outputs: Any, inputs: Any, number: Any) -> torch.Tensor:
    return 0.01 * _tokens(outputs, inputs["labels"], "sum")


def _of_rows(outputs: Any, inputs: Any, number: Any) -> torch.Tensor:
    return _tokens(outputs, inputs["labels"], "none").sum(1).mean()


def _beginning(base: type) -> type:
    """The class of trainers whose loss has a part from the second update on that needs all rows."""

    class Beginning(overriding(_mean)(base)):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            value, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            if self.state.global_step:
                value = value + outputs["logits"].mean((0, 1)).square().sum()
            return (value, outputs) if return_outputs else value

    return Beginning


def _distilled(outputs: Any, inputs: Any, number: Any) -> torch.Tensor:
    teacher = functional.one_hot(inputs["input_ids"], VOCABULARY).to(outputs["logits"].dtype)
    away = functional.kl_div(outputs["logits"].log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
    counted = inputs["labels"].ne(-100)
    counted[:, 0] = False
    return _mean(outputs, inputs, number) + (away * counted).sum() / counted.sum()


def _weighted(outputs: Any, inputs: Any, number: Any) -> torch.Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=outputs["logits"].dtype)
    return functional.cross_entropy(outputs["logits"], inputs["labels"], weight=weights)


def _in_batch_negatives(outputs: Any, inputs: Any, number: Any) -> torch.Tensor:
    hidden = functional.normalize(outputs["hidden"], dim=-1)
    alike = hidden @ functional.normalize(inputs["inputs"], dim=-1).T
    return functional.cross_entropy(alike * 8, torch.arange(len(alike)))


def _preferred(outputs: Any, inputs: Any, number: Any) -> torch.Tensor:
    chosen, rejected = outputs["logits"].sum(-1).chunk(2)
    return -functional.logsigmoid(chosen - rejected).mean()


def _chosen_first(samples: Sequence[Sample]) -> dict[str, Any]:
    """As TRL's collators: the chosen rows, and after them the rejected ones."""
    inputs = torch.stack([one["inputs"] for one in samples])
    return {"inputs": torch.cat([inputs, 0.5 * inputs.flip(1)])}


def _in_blocks(made: Callable[[type], type]) -> Callable[[type], type]:
    """The class of trainers, told that rows belong together."""
    return lambda base: type("InBlocks", (made(base),), {"row_blocks": 2})


def _with_names(samples: Sequence[Sample]) -> dict[str, Any]:
    """A batch with a list of strings, one of lists, and what is no list of rows."""
    names = [str(int(one["labels"])) for one in samples]
    return {
        "inputs": torch.stack([one["inputs"] for one in samples]),
        "names": names,
        "about": [{"name": one} for one in names],
        "weights": [1.0, 2.0, 3.0],
    }


def _named(outputs: Any, inputs: Any, number: Any) -> torch.Tensor:
    labels = torch.tensor([int(one) for one in inputs["names"]])
    assert [one["name"] for one in inputs["about"]] == inputs["names"]
    assert len(inputs["weights"]) == 3
    return functional.cross_entropy(outputs["logits"], labels)


def _function(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    total = _tokens(outputs, labels, "sum")
    return total / (labels[:, 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


def _mean_function(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return _tokens(outputs, labels, "mean")


def _sum_function(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return 0.01 * _tokens(outputs, labels, "sum")


def _with_gradients(outputs: Any, inputs: Any, number: Any) -> torch.Tensor:
    if not outputs["logits"].requires_grad:
        raise RuntimeError("this loss is of training only")
    return functional.cross_entropy(outputs["logits"], inputs["labels"])


LOSSES = {
    "model": Loss(_gpt2, _text, rounding=FLOAT32),
    "smoothed": Loss(_gpt2, _text, rounding=FLOAT32, given={"label_smoothing_factor": 0.1}),
    "mean": Loss(_llama, _text, overriding(_mean)),
    "divided sum": Loss(_llama, _text, overriding(_divided_sum)),
    "sum": Loss(_llama, _text, overriding(_sum)),
    "rows": Loss(_llama, _text, overriding(_of_rows)),
    "rows that are mostly whole": Loss(_llama, _mostly_whole, overriding(_of_rows)),
    "beginning later": Loss(_llama, _text, _beginning, adds_up=False, is_of_replicas=False),
    "mean of other labels": Loss(_gpt2, _text, overriding(_mean)),
    "distilled": Loss(_llama, _text, overriding(_distilled)),
    "function": Loss(_llama, _text, given={"compute_loss_func": _function}),
    "mean function": Loss(_llama, _text, given={"compute_loss_func": _mean_function}),
    "sum function": Loss(_llama, _text, given={"compute_loss_func": _sum_function}),
    "encoder and decoder": Loss(_t5, _text, rounding=FLOAT32),
    "no arguments": Loss(Classifier, _point),
    "rows of the model": Loss(OfRows, _point_of_many),
    "sum of the model": Loss(Sum, _point),
    "additions": Loss(TakesNumber, _point),
    "weighted": Loss(Classifier, _all_labelled, overriding(_weighted), adds_up=False),
    "router": Loss(_mixtral, _text, adds_up=False),
    "in-batch negatives": Loss(Classifier, _all_labelled, overriding(_in_batch_negatives), adds_up=False),
    "pairs": Loss(
        Classifier, _all_labelled, overriding(_preferred), given={"data_collator": _chosen_first}, adds_up=False
    ),
    "pairs together": Loss(
        Classifier, _all_labelled, _in_blocks(overriding(_preferred)), given={"data_collator": _chosen_first}
    ),
    "training only": Loss(Classifier, _all_labelled, overriding(_with_gradients), answers=False),
    "lists": Loss(Classifier, _all_labelled, overriding(_named), given={"data_collator": _with_names}),
}
