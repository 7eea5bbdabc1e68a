"""Trains on every loss, alone by transformers' Trainer or as a rank by ours: ``FOLDER JOB``, as ``test_losses`` says.

Alone, writes the losses and weights that every training has come to; a rank compares its own with them, and its last
line of output says by how much they differ and what was warned of.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.trainers.losses import LOSSES, SAMPLES, Loss

BATCH, STEPS = 8, 2


def trained(kinds: Any, loss: Loss, folder: Path, replicas: int, accumulated: int) -> tuple[Any, list[float]]:
    """The trainer after two updates, and the losses that it has logged, of evaluations before and after them too."""
    generator = torch.Generator().manual_seed(3)
    samples = [loss.sample(generator) for _ in range(SAMPLES)]
    torch.manual_seed(1)
    given = dict(loss.given)
    smoothing = {"label_smoothing_factor": given.pop("label_smoothing_factor", 0.0)}
    trainer = loss.trainer(kinds.Trainer)(
        model=loss.build().double(),
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
            **smoothing,
        ),
        train_dataset=samples,
        eval_dataset=samples[: 2 * BATCH],
        **given,
    )
    evaluates = loss.answers and "data_collator" not in given
    if evaluates:
        trainer.evaluate()
    trainer.train()
    if evaluates:
        trainer.evaluate()
    history = trainer.state.log_history
    return trainer, [entry[name] for name in ("loss", "eval_loss") for entry in history if name in entry]


def alone(folder: Path) -> None:
    """Train on each loss in one process."""
    import transformers

    for name, loss in LOSSES.items():
        for accumulated in (1, 2):
            trainer, losses = trained(transformers, loss, folder, 1, accumulated)
            state = {key: value.contiguous().clone() for key, value in trainer.model.state_dict().items()}
            save_file({**state, "losses": torch.tensor(losses)}, folder / f"{name}-{accumulated}.safetensors")


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
    told: dict[str, Any] = {}
    for index, (name, loss) in enumerate(LOSSES.items()):
        heard.texts.clear()
        # Every loss, accumulated in some jobs and not in others.
        accumulated = 1 + (index + smp.dp_size() + config["microbatches"] // 2) % 2
        trainer, losses = trained(huggingface, loss, folder, smp.dp_size(), accumulated)
        state = trainer.distributed_model.state_dict()
        expected = load_file(folder / f"{name}-{accumulated}.safetensors")
        wanted = expected.pop("losses")
        scale = max(float(value.abs().max()) for value in expected.values())
        told[name] = {
            "accumulated": accumulated,
            "loss": float(((torch.tensor(losses) - wanted) / wanted).abs().max()),
            "weights": max(float((state[key] - value).abs().max()) / scale for key, value in expected.items()),
            "warned": [text for text in heard.texts if "microbatch" in text or "pipeline_parallel" in text],
        }
    print(json.dumps(told))
    smp.shutdown()


def main() -> None:
    """Run as the arguments say."""
    folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    if job is None:
        alone(folder)
    else:
        over_ranks(folder, job)


if __name__ == "__main__":
    main()
