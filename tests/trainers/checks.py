"""Facts about Trainer that every rank of a job checks; the last line of the output says how many.

usage: python -m tests.trainers.checks RANKS FOLDER
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import shardwright as smp
import torch
import transformers
from shardwright import huggingface
from torch import nn

from tests.trainers.listed import Checks
from tests.trainers.models import KINDS, VOCABULARY, Samples, data

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
CHECKS = Checks()
check = CHECKS.add


def refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """The call raises this error, which says this."""
    with pytest.raises(error, match=text):
        call()


def arguments(**others: Any) -> huggingface.TrainingArguments:
    """Arguments of a short training, with batches of 6 over all ranks."""
    given = {
        "per_device_train_batch_size": 6 // smp.dp_size(),
        "per_device_eval_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "seed": 1,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return huggingface.TrainingArguments(**{"output_dir": str(FOLDER / "out"), **given, **others})


def gpt2() -> tuple[Any, Samples]:
    """A model and what it is trained on, the same on every rank."""
    torch.manual_seed(0)
    return KINDS["gpt2"].build(0.0).double(), data(KINDS["gpt2"], torch.float64)[0]


def batches(samples: Any, size: int = 6, count: int = 2) -> list[dict[str, torch.Tensor]]:
    """Global batches, in order."""
    chosen = [[samples[number * size + one] for one in range(size)] for number in range(count)]
    return [{key: torch.stack([one[key] for one in batch]) for key in batch[0]} for batch in chosen]


def descended(model: nn.Module, loss_of: Callable[[nn.Module, Any], torch.Tensor], given: list[Any]) -> list[float]:
    """The losses of plain gradient descent."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for batch in given:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def loss_in_trainer(model: Any, batch: Any) -> torch.Tensor:
    """What Trainer has a model of text compute: a sum, which the model divides by the number of labels."""
    return model(**batch, num_items_in_batch=_number(batch)).loss


def _number(batch: Any) -> torch.Tensor:
    return batch["labels"].ne(-100).sum()


def losses_of(trainer: Any) -> list[float]:
    """What was logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def same(ours: list[float], theirs: list[float], bar: float = 2e-7) -> None:
    """The lists are equal but for rounding."""
    assert len(ours) == len(theirs), (ours, theirs)
    assert all(abs(one - other) <= bar * abs(other) for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


class Regression(nn.Module):
    """A model of no library, which takes no arguments of losses; its labels are of different numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64, dtype=torch.float64), nn.Linear(64, 8, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        outputs = self.second(torch.tanh(self.first(inputs)))
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}


def regression() -> tuple[Regression, Samples]:
    """The model, and samples of which some have no label."""
    torch.manual_seed(2)
    labels = [-100 if number % 4 == 1 else number % 8 for number in range(24)]
    samples = [{"inputs": torch.randn(16, dtype=torch.float64), "labels": torch.tensor(one)} for one in labels]
    return Regression(), Samples(samples)


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Samples without a length."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self._samples[index] for index in range(len(self._samples)))


@check
def plain_arguments_are_taken_and_saved_as_such() -> None:
    args = transformers.TrainingArguments(str(FOLDER / "plain"), report_to=[], max_steps=1)
    model, samples = gpt2()
    trainer = huggingface.Trainer(model=model, args=args, train_dataset=samples)
    assert trainer.args is args
    assert (args.world_size, args.process_index) == (smp.dp_size(), smp.dp_rank())
    assert type(pickle.loads(pickle.dumps(args))) is transformers.TrainingArguments
    assert type(pickle.loads(pickle.dumps(arguments()))) is transformers.TrainingArguments
    assert args.should_save == trainer.is_world_process_zero() == (smp.rank() == 0)


@check
def losses_are_those_of_the_global_batch() -> None:
    model, samples = gpt2()
    expected = descended(copy.deepcopy(model), loss_in_trainer, batches(samples))
    trainer = huggingface.Trainer(model=model, args=arguments(), train_dataset=samples)
    trainer.train()
    same(losses_of(trainer), expected)


@check
def a_function_of_losses_gets_the_number_of_labels() -> None:
    def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, wanted = outputs.logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)
        total = nn.functional.cross_entropy(logits, wanted, reduction="sum")
        return total / ((wanted != -100).sum() if num_items_in_batch is None else num_items_in_batch)

    model, samples = gpt2()
    expected = descended(
        copy.deepcopy(model),
        lambda one, batch: loss_of(one(**batch), batch["labels"], _number(batch)),
        batches(samples),
    )
    trainer = huggingface.Trainer(model=model, args=arguments(), train_dataset=samples, compute_loss_func=loss_of)
    trainer.train()
    same(losses_of(trainer), expected)


@check
def a_model_that_takes_no_arguments_of_losses_gets_means_over_labels() -> None:
    model, samples = regression()
    if smp.dp_size() > 1:
        return  # plain data parallelism averages the ranks' means too
    expected = descended(copy.deepcopy(model), lambda one, batch: one(**batch)["loss"], batches(samples))
    trainer = huggingface.Trainer(model=model, args=arguments(), train_dataset=samples)
    trainer.train()
    same(losses_of(trainer), expected)


@check
def a_microbatch_without_labels_counts_for_nothing() -> None:
    model, samples = regression()
    emptied = Samples([{**samples[one], "labels": torch.tensor(-100 if one % 6 < 3 else 1)} for one in range(24)])
    if smp.dp_size() > 1:
        return
    expected = descended(copy.deepcopy(model), lambda one, batch: one(**batch)["loss"], batches(emptied))
    trainer = huggingface.Trainer(model=model, args=arguments(), train_dataset=emptied)
    trainer.train()
    same(losses_of(trainer), expected)


@check
def batches_that_microbatches_do_not_divide_are_trained_on() -> None:
    model, samples = gpt2()
    short = Samples([samples[one] for one in range(7 * smp.dp_size())])
    args = arguments(per_device_train_batch_size=7, max_steps=2)
    expected = descended(copy.deepcopy(model), loss_in_trainer, 2 * batches(short, 7 * smp.dp_size(), 1))
    trainer = huggingface.Trainer(model=model, args=args, train_dataset=short)
    trainer.train()
    same(losses_of(trainer), expected)


@check
def samples_without_a_length_are_divided_too() -> None:
    model, samples = gpt2()
    expected = descended(copy.deepcopy(model), loss_in_trainer, batches(samples))
    trainer = huggingface.Trainer(model=model, args=arguments(), train_dataset=Stream(samples))
    trainer.train()
    same(losses_of(trainer), expected)


@check
def labels_are_smoothed() -> None:
    model, samples = gpt2()
    smoother = transformers.trainer_pt_utils.LabelSmoother(0.1)

    def smoothed(one: Any, batch: Any) -> torch.Tensor:
        outputs = one(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        number = batch["labels"].ne(-100).sum()
        return smoother(outputs, batch["labels"], shift_labels=True, num_items_in_batch=number)

    plain = copy.deepcopy(model)
    expected = descended(plain, smoothed, batches(samples))
    args = arguments(label_smoothing_factor=0.1, per_device_eval_batch_size=2)
    trainer = huggingface.Trainer(model=model, args=args, train_dataset=samples)
    trainer.train()
    same(losses_of(trainer), expected)
    size, total = 2 * smp.dp_size(), 7  # the last batch has one sample, on one replica
    parts = [[samples[one] for one in range(begin, min(begin + size, total))] for begin in range(0, total, size)]
    with torch.no_grad():
        alone = [len(part) * float(smoothed(plain.eval(), *batches(part, len(part), 1))) for part in parts]
    found = trainer.evaluate(Samples([samples[one] for one in range(total)]))
    same([found["eval_loss"]], [sum(alone) / total])


@check
def bfloat16_is_autocast() -> None:
    def cast(one: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_in_trainer(one, batch)

    model, samples = gpt2()
    model = model.float()
    expected = descended(copy.deepcopy(model), cast, batches(samples))
    seen: list[torch.dtype] = []
    for layer in model.transformer.h:
        layer.mlp.c_fc.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trainer = huggingface.Trainer(model=model, args=arguments(bf16=True, use_cpu=True), train_dataset=samples)
    trainer.train()
    same(losses_of(trainer), expected, 2e-4)
    assert seen, "no layer of this rank ran"
    assert set(seen) == {torch.bfloat16}, "a layer was not cast"
    assert all(parameter.dtype is torch.float32 for parameter in trainer.model.parameters())


@check
def what_is_saved_is_read_by_transformers_alone() -> None:
    model, samples = gpt2()
    args = arguments(save_strategy="steps", save_steps=1, save_only_model=True, output_dir=str(FOLDER / "only"))
    trainer = huggingface.Trainer(model=model, args=args, train_dataset=samples)
    trainer.train()
    trainer.save_model(str(FOLDER / "final"))
    state = trainer.distributed_model.state_dict()
    for folder in (FOLDER / "final", FOLDER / "only" / "checkpoint-2"):
        read = transformers.GPT2LMHeadModel.from_pretrained(folder)
        assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())
    refused(
        smp.CheckpointError,
        "from_pretrained",
        lambda: trainer.train(resume_from_checkpoint=str(FOLDER / "only" / "checkpoint-2")),
    )


@check
def generation_and_calls_run_in_steps() -> None:
    model, samples = gpt2()
    (batch, *_) = batches(samples)
    alone = copy.deepcopy(model).eval()
    with torch.no_grad():
        beginnings = batch["input_ids"][:, :4]
        expected = alone.generate(beginnings, max_new_tokens=3, do_sample=False, use_cache=False)
        logits = alone(**batch).logits
    trainer = huggingface.Trainer(model=model, args=arguments(), train_dataset=samples)
    trainer.distributed_model.eval()
    with torch.no_grad():
        outputs = trainer.model_in_steps(**batch)
        made = trainer.model_in_steps.generate(beginnings, max_new_tokens=3, do_sample=False)
    assert torch.equal(made, expected)
    assert torch.allclose(outputs.logits, logits, rtol=0, atol=1e-12)


@check
def trainings_begin_anew_after_evaluations_and_trainings() -> None:
    samples = gpt2()[1]
    trainer = huggingface.Trainer(
        model_init=lambda: gpt2()[0], args=arguments(), train_dataset=samples, eval_dataset=samples
    )
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.train()
    first = losses_of(trainer)
    trainer.train()
    assert losses_of(trainer) == first


@check
def adapters_are_saved_alone_and_read_by_peft() -> None:
    torch.manual_seed(0)
    model, samples = KINDS["llama-lora"].build(0.0), data(KINDS["llama-lora"], torch.float32)[0]
    args = arguments(gradient_checkpointing=True)
    trainer = huggingface.Trainer(model=model, args=args, train_dataset=samples)
    before = {name: value.clone() for name, value in trainer.distributed_model.state_dict().items()}
    trainer.train()
    trainer.save_model(str(FOLDER / "adapters"))
    state = trainer.distributed_model.state_dict()
    changed = {name for name, value in state.items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    torch.manual_seed(0)
    base = KINDS["llama-lora"].build(0.0).unload()
    read = peft.PeftModel.from_pretrained(base, FOLDER / "adapters").state_dict()
    assert all(torch.equal(value, read[name]) for name, value in state.items())


@check
def a_callback_stops_all_ranks() -> None:
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 1

    model, samples = gpt2()
    trainer = huggingface.Trainer(model=model, args=arguments(), train_dataset=samples, callbacks=[Stop()])
    trainer.train()
    assert trainer.state.global_step == 1


@check
def what_cannot_work_is_refused() -> None:
    model, samples = gpt2()
    distributed = smp.DistributedModel(model)
    refused(
        smp.ConfigError,
        "the model itself",
        lambda: huggingface.Trainer(model=distributed, args=arguments(), train_dataset=samples),
    )
    refused(smp.ConfigError, "auto_find_batch_size", lambda: arguments(auto_find_batch_size=True))
    uneven = arguments(accelerator_config={"dispatch_batches": True})
    refused(
        smp.ConfigError,
        "dispatch_batches",
        lambda: huggingface.Trainer(model=gpt2()[0], args=uneven, train_dataset=samples),
    )
    trainer = huggingface.Trainer(model=gpt2()[0], args=arguments(), train_dataset=samples)
    refused(smp.ConfigError, "a job for each trial", trainer.hyperparameter_search)


@check
def the_trainer_of_transformers_says_what_to_write() -> None:
    model, samples = gpt2()
    distributed = smp.DistributedModel(model)
    refused(
        smp.ConfigError,
        "from shardwright.huggingface import Trainer",
        lambda: transformers.Trainer(model=distributed, args=arguments(), train_dataset=samples),
    )


def main() -> None:
    """Run all."""
    from tests.trainers.more_checks import MORE

    ranks = int(sys.argv[1])
    refused(smp.ConfigError, "smp.init", lambda: huggingface.Trainer(model=nn.Linear(2, 2)))
    smp.init(pipeline_parallel_degree=2 if ranks == 2 else 1, microbatches=2, ddp=ranks > 1)
    for one in MORE:
        check(one)
    CHECKS.run(smp.rank())
    smp.shutdown()


if __name__ == "__main__":
    main()
