"""Trains on every loss, by transformers' Trainer or as a rank by ours: ``FOLDER JOB``, as ``test_losses`` says.

The former runs in one process, and for losses that depend on the rows of a replica by DDP over two, and writes the
losses and weights that every training has come to. A rank compares its own with them, and its last line of output says
by how much they differ and what was warned of.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.trainers.losses import LOSSES, SAMPLES, Loss, Sample

BATCH, STEPS = 8, 2
#: The losses of which streams are evaluated, too: of labels, and of rows, by a model and by a trainer.
STREAMED = ("no arguments", "rows of the model", "rows", "mean")


def trained(kinds: Any, loss: Loss, folder: Path, replicas: int, accumulated: int) -> tuple[Any, list[float]]:
    """The trainer after two updates, and the losses that it has logged, of evaluations before and after them too."""
    generator = torch.Generator().manual_seed(3)
    samples = [loss.sample(generator) for _ in range(SAMPLES)]
    torch.manual_seed(1)
    given = dict(loss.given)
    smoothing = {"label_smoothing_factor": given.pop("label_smoothing_factor", 0.0)}
    model: Any = loss.build().double()
    by_ddp = replicas > 1 and kinds.__name__ == "transformers"
    if by_ddp and hasattr(model, "router_aux_loss_coef"):  # whole losses are multiplied by the number of replicas
        model.router_aux_loss_coef /= replicas
    trainer = loss.trainer(kinds.Trainer)(
        model=model,
        args=kinds.TrainingArguments(
            str(folder / "out"),
            per_device_train_batch_size=BATCH // replicas,
            per_device_eval_batch_size=BATCH // replicas,
            gradient_accumulation_steps=accumulated,
            max_steps=STEPS,
            logging_steps=1,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            save_strategy="no",
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
            **smoothing,
        ),
        train_dataset=samples,
        eval_dataset=samples[: 2 * BATCH],
        **given,
    )
    evaluates = loss.answers and "data_collator" not in given
    if evaluates and not by_ddp:  # what was evaluated is not wrapped
        trainer.evaluate()
    trainer.train()
    if evaluates:
        trainer.evaluate()
    history = trainer.state.log_history
    return trainer, [entry[name] for name in ("loss", "eval_loss") for entry in history if name in entry]


class Stream(torch.utils.data.IterableDataset[Sample]):
    """Samples of which it is not known how many there are."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)


def evaluated(trainer: Any) -> list[tuple[int, float]]:
    """How many rows metrics get of streams of drawn sizes, and the losses of their evaluation."""
    draw, told = random.Random(5), []
    rows: list[int] = []

    def count(prediction: Any) -> dict[str, float]:
        rows.append(len(prediction.label_ids))
        predicted = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        assert len(predicted) == len(prediction.label_ids)
        return {}

    trainer.compute_metrics = count
    for size in (1, BATCH, *(draw.randint(2, 3 * BATCH) for _ in range(6))):
        loss = trainer.evaluate(Stream(trainer.train_dataset[:size]))["eval_loss"]
        told.append((rows.pop(), loss))
    return told


def plainly(folder: Path, replicas: int) -> None:
    """Train on each loss in one process, or as one of several under DDP."""
    import transformers

    for name, loss in LOSSES.items():
        if replicas > 1 and loss.adds_up:
            continue
        for accumulated in (1, 2):
            trainer, losses = trained(transformers, loss, folder, replicas, accumulated)
            if name in STREAMED:
                (folder / f"streams-{name}-{accumulated}.json").write_text(json.dumps(evaluated(trainer)))
            if trainer.args.process_index == 0:
                state = {key: value.contiguous().clone() for key, value in trainer.model.state_dict().items()}
                save_file({**state, "losses": torch.tensor(losses)}, plain(folder, name, accumulated, replicas))


def plain(folder: Path, name: str, accumulated: int, replicas: int) -> Path:
    """Where it is written what a training of transformers has come to."""
    return folder / f"{name}-{accumulated}-{replicas}.safetensors"


class Heard(logging.Handler):
    """Keeps what was warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def over_ranks(folder: Path, config: dict[str, Any]) -> None:
    """Train on each loss as a rank of a job."""
    import shardwright as smp
    from shardwright import huggingface

    smp.init({"deterministic_server": True, **config})
    heard = Heard()
    logging.getLogger("shardwright").addHandler(heard)
    told, streams = dict[str, Any](), dict[str, Any]()
    for index, (name, loss) in enumerate(LOSSES.items()):
        if smp.dp_size() > 1 and not loss.is_of_replicas:
            continue
        heard.texts.clear()
        # Every loss, accumulated in some jobs and not in others.
        accumulated = 1 + (index + smp.dp_size() + config["microbatches"] // 2) % 2
        trainer, losses = trained(huggingface, loss, folder, smp.dp_size(), accumulated)
        state = trainer.distributed_model.state_dict()
        expected = load_file(plain(folder, name, accumulated, 1 if loss.adds_up else smp.dp_size()))
        wanted = expected.pop("losses")
        if name in STREAMED:
            alone = json.loads((folder / f"streams-{name}-{accumulated}.json").read_text())
            streams[name] = {"ours": evaluated(trainer), "plain": alone}
        scale = max(float(value.abs().max()) for value in expected.values())
        told[name] = {
            "accumulated": accumulated,
            "loss": float(((torch.tensor(losses) - wanted) / wanted).abs().max()),
            "weights": max(float((state[key] - value).abs().max()) / scale for key, value in expected.items()),
            "warned": [text for text in heard.texts if "microbatch" in text or "pipeline_parallel" in text],
        }
    print(json.dumps({"streams": streams, "losses": told}))
    smp.shutdown()


def main() -> None:
    """Run as the arguments say."""
    folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    if isinstance(job, int):
        plainly(folder, job)
    else:
        over_ranks(folder, job)


if __name__ == "__main__":
    main()
