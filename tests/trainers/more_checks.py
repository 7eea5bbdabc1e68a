"""Facts about Trainer's folders and streams of samples, which ``checks.py`` runs after its own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import shardwright as smp
from shardwright import huggingface

from tests.trainers.checks import FOLDER, Stream, arguments, gpt2, losses_of, refused, same
from tests.trainers.models import Samples


@contextmanager
def told() -> Iterator[list[str]]:
    """What the library warns of in the block."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("shardwright").removeHandler(handler)


def a_training_goes_on_from_the_newest_complete_checkpoint() -> None:
    samples, folder = gpt2()[1], FOLDER / "killed"
    kept = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(folder)}
    whole = huggingface.Trainer(model=gpt2()[0], args=arguments(max_steps=4, **kept), train_dataset=samples)
    whole.train()
    smp.barrier()
    if smp.rank() == 0:  # as a rank that is killed in a save, and one that is killed after it, leave them
        (folder / "checkpoint-4" / "trainer_partial" / "manifest.json").unlink()
        (folder / "checkpoint-3" / "trainer_state.json").unlink()
    smp.barrier()
    again = huggingface.Trainer(model=gpt2()[0], args=arguments(max_steps=4, **kept), train_dataset=samples)
    with told() as texts:
        again.train(resume_from_checkpoint=True)
    assert losses_of(again) == losses_of(whole)
    if smp.rank() == 0:
        assert any("checkpoint-4" in text and "checkpoint-2" in text for text in texts), texts


def evaluation_of_a_stream_counts_each_sample_once() -> None:
    model, samples = gpt2()
    for number in (11, 12, 3):
        some = Samples([samples[one] for one in range(number)])
        trainer = huggingface.Trainer(
            model=copy.deepcopy(model),
            args=arguments(),
            train_dataset=samples,
            compute_metrics=lambda predicted: {"rows": len(predicted.label_ids)},
        )
        listed, streamed = trainer.evaluate(some), trainer.evaluate(Stream(some))
        assert streamed["eval_rows"] == listed["eval_rows"] == number
        same([streamed["eval_loss"]], [listed["eval_loss"]])


def an_own_training_step_calls_that_of_this_class_or_is_told_to() -> None:
    class Counts(huggingface.Trainer):
        steps = 0

        def training_step(self, *given: Any) -> Any:
            self.steps += 1
            return super().training_step(*given)

    class Runs(huggingface.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    model, samples = gpt2()
    trainer = Counts(model=model, args=arguments(), train_dataset=samples)
    trainer.train()
    assert trainer.steps == 2
    refused(
        smp.ConfigError,
        "Runs.training_step does not call super.*override compute_loss",
        lambda: Runs(model=gpt2()[0], args=arguments(), train_dataset=samples),
    )


MORE = (
    a_training_goes_on_from_the_newest_complete_checkpoint,
    evaluation_of_a_stream_counts_each_sample_once,
    an_own_training_step_calls_that_of_this_class_or_is_told_to,
)
