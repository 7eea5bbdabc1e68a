"""A rank of jobs with a pipeline that train in plain loops; the last line of its output has what each was warned of."""

from __future__ import annotations

import json
import logging
import tempfile

import shardwright as smp
import torch
from torch import nn


def by_trainer() -> None:
    """Train by Trainer of transformers itself, as it does where nobody has named the job to it."""
    import transformers

    class Model(nn.Linear):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": (super().forward(inputs) - labels).square().mean()}

    samples = [{"inputs": torch.ones(4), "labels": torch.zeros(4)} for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
        )
        transformers.Trainer(Model(4, 4), args, train_dataset=samples).train()


def by_hand() -> None:
    """Train in a loop."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()


def by_accelerate() -> None:
    """Train in a loop of accelerate itself, which knows of no job of the library."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()


def by_two_optimizers() -> None:
    """Train two models in a loop."""
    by_hand()
    by_hand()


def main() -> None:
    """Train in one job after another, tell."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    told = {}
    for loop in (by_hand, by_two_optimizers, by_accelerate, by_trainer):
        texts.clear()
        smp.init(pipeline_parallel_degree=2)
        loop()
        smp.shutdown()
        told[loop.__name__] = [text for text in texts if "pipeline_parallel_degree" in text]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
