"""Facts about transformers' Trainer on its path for the original library; the last line says how many.

usage: python -m tests.trainers.original_checks RANKS FOLDER
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from typing import Any

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
import transformers
from shardwright import huggingface
from torch import nn

from tests.trainers.checks import arguments, batches, descended, loss_in_trainer, losses_of, refused
from tests.trainers.checks import same as within
from tests.trainers.listed import Checks
from tests.trainers.models import KINDS, ORIGINAL, VOCABULARY, Samples, data

#: In float32, as Trainer adds up losses.
same = functools.partial(within, bar=1e-6)
FOLDER = sys.argv[2] if len(sys.argv) > 2 else ""
CHECKS = Checks()
check = CHECKS.add


def gpt2() -> tuple[Any, Samples]:
    """A model and samples with as many labels each, the same on every rank."""
    torch.manual_seed(0)
    kind = ORIGINAL["smp-gpt2"]
    return kind.build(0.0).double(), data(kind, torch.float64)[0]


def first(samples: Samples, count: int) -> Samples:
    """The first of the samples."""
    return Samples([samples[index] for index in range(count)])


def trainer_of(model: Any, samples: Any, **others: Any) -> Any:
    """A Trainer of transformers; arguments that Trainer takes itself are among the others."""
    own = {
        name: others.pop(name)
        for name in ("callbacks", "optimizers", "data_collator", "eval_dataset")
        if name in others
    }
    return transformers.Trainer(model=model, args=arguments(**others), train_dataset=samples, **own)


@check
def a_last_batch_that_microbatches_do_not_divide_is_trained_on() -> None:
    model, samples = gpt2()
    ranks, size = smp.dp_size(), 6
    count = size + (5 if ranks == 1 else ranks)  # of several replicas each gets one
    parts = [[samples[index] for index in range(count)][begin : begin + size] for begin in (0, size)]
    given = [batches(part, len(part), 1)[0] for part in parts]
    expected = descended(copy.deepcopy(model), loss_in_trainer, given)
    trainer = trainer_of(model, first(samples, count), max_steps=-1, num_train_epochs=1)
    if ranks == 1:
        trainer.train()
        same(losses_of(trainer), expected)
    else:  # filled up to a whole one
        trainer.train()
        same(losses_of(trainer)[:1], expected[:1])
        assert len(losses_of(trainer)) == 2


@check
def any_number_of_samples_is_evaluated_before_training_and_after() -> None:
    model, samples = gpt2()
    plain = copy.deepcopy(model).eval()
    trainer = trainer_of(model, samples)
    for count in (1, 3, 5):
        with torch.no_grad():
            expected = float(plain(**batches(samples, count, 1)[0]).loss)
        predicted = trainer.predict(first(samples, count))
        assert predicted.predictions.shape == (count, 24, VOCABULARY)
        if smp.dp_size() == 1:
            same([predicted.metrics["test_loss"]], [expected])
    expected = descended(plain.train(), loss_in_trainer, batches(samples))
    trainer.train()
    same(losses_of(trainer), expected)
    trainer.train()
    assert trainer.state.global_step == 2
    with torch.no_grad():
        assert trainer.evaluate(first(samples, 4))["eval_loss"] < expected[0]


@check
def labels_of_different_lengths_are_predicted_and_padded() -> None:
    model, samples = gpt2()
    plain = copy.deepcopy(model).eval()
    lengths = [3, 7, 5, 4, 9, 2, 6, 8, 3]
    ragged = [{key: value[:length] for key, value in samples[at].items()} for at, length in enumerate(lengths)]

    def padded(given: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        longest = max(len(one["labels"]) for one in given)
        fillers = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            key: torch.stack([nn.functional.pad(one[key], (0, longest - len(one[key])), value=fill) for one in given])
            for key, fill in fillers.items()
        }

    trainer = trainer_of(model, samples, data_collator=padded)
    predicted = trainer.predict(Samples(ragged))
    assert predicted.label_ids.shape[0] == predicted.predictions.shape[0] == len(ragged)
    for index, one in enumerate(ragged):
        length = lengths[index]
        assert np.array_equal(predicted.label_ids[index, :length], one["labels"])
        assert (predicted.label_ids[index, length:] == -100).all()
        with torch.no_grad():
            logits = plain(input_ids=one["input_ids"][None]).logits[0].numpy()
        assert np.allclose(predicted.predictions[index, :length], logits, rtol=0, atol=1e-10)


@check
def an_optimizer_that_is_given_is_used() -> None:
    model, samples = gpt2()
    expected = descended(copy.deepcopy(model), loss_in_trainer, batches(samples))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = trainer_of(model, samples, optimizers=(optimizer, None))
    trainer.train()
    same(losses_of(trainer), expected)


@check
def models_are_made_anew_for_every_training() -> None:
    samples = gpt2()[1]
    trainer = transformers.Trainer(model_init=lambda: gpt2()[0], args=arguments(), train_dataset=samples)
    trainer.train()
    once = losses_of(trainer)
    trainer.train()
    assert losses_of(trainer) == once


@check
def callbacks_stop_training_on_all_ranks() -> None:
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 1

    model, samples = gpt2()
    trainer = trainer_of(model, samples, callbacks=[Stop()])
    trainer.train()
    assert trainer.state.global_step == 1


@check
def checkpoints_are_kept_to_a_number_and_resumed() -> None:
    model, samples = gpt2()
    folder = os.path.join(FOLDER, "limited")
    kept = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "output_dir": folder}
    whole = trainer_of(model, samples, max_steps=4, **kept)
    whole.train()
    smp.barrier()
    assert sorted(os.listdir(folder)) == ["checkpoint-4"]
    longer = trainer_of(gpt2()[0], samples, max_steps=6, **kept)
    longer.train(resume_from_checkpoint=True)
    expected = descended(gpt2()[0], loss_in_trainer, batches(samples, count=6))
    same(losses_of(longer), expected)


@check
def a_model_of_no_library_is_saved_and_resumed() -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.first, self.second = nn.Linear(8, 64, dtype=torch.float64), nn.Linear(64, 1, dtype=torch.float64)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            outputs = self.second(torch.tanh(self.first(inputs))).squeeze(-1) * self.scale
            return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}

    torch.manual_seed(1)
    samples = Samples(
        [{"inputs": (row := torch.randn(8, dtype=torch.float64)), "labels": row.sum()} for _ in range(24)]
    )
    model = Regression()
    expected = descended(copy.deepcopy(model), lambda one, batch: one(**batch)["loss"], batches(samples, count=4))
    kept = {"save_strategy": "steps", "save_steps": 2, "output_dir": os.path.join(FOLDER, "own"), "max_steps": 4}
    trainer_of(copy.deepcopy(model), samples, **kept).train()
    trainer = trainer_of(model, samples, **kept)
    trainer.train(resume_from_checkpoint=os.path.join(FOLDER, "own", "checkpoint-2"))
    same(losses_of(trainer), expected)


@check
def all_parameters_decay_but_biases_and_norms() -> None:
    model, samples = gpt2()
    plain = transformers.Trainer.get_decay_parameter_names(None, model)
    trainer = trainer_of(model, samples, weight_decay=0.1, max_steps=1)
    trainer.train()
    assert trainer.get_decay_parameter_names(trainer.model_wrapped) == plain
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    decayed, rest = (group["params"] for group in trainer.optimizer.param_groups)
    assert {names[id(one)] for one in decayed} <= set(plain)
    assert not {names[id(one)] for one in rest} & set(plain)


@check
def what_cannot_work_is_refused() -> None:
    model, samples = gpt2()
    kept = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    torch.manual_seed(0)
    adapted = trainer_of(
        KINDS["llama-lora"].build(0.0),
        samples,
        eval_dataset=first(samples, 6),
        load_best_model_at_end=True,
        output_dir=os.path.join(FOLDER, "adapters"),
        **kept,
    )
    refused(smp.exceptions.CheckpointError, "peft are not loaded", adapted.train)
    refused(smp.exceptions.ConfigError, "sagemaker_mpi_enabled", lambda: huggingface.Trainer(model=model))
    refused(ValueError, "BF16", lambda: trainer_of(model, samples, bf16=True, use_cpu=True))


def main() -> None:
    """Run all, in a job that the import of transformers has started."""
    CHECKS.run(smp.rank())
    smp.shutdown()


if __name__ == "__main__":
    main()
