"""A rank of a job with a pipeline that trains in a plain loop; the last line of its output has what was warned of."""

from __future__ import annotations

import json
import logging
import sys
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


def main() -> None:
    """Train, tell."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    smp.init(pipeline_parallel_degree=2)
    if sys.argv[1] == "trainer":
        by_trainer()
    else:
        by_hand()
    print(json.dumps([text for text in texts if "pipeline_parallel_degree" in text]))
    smp.shutdown()


if __name__ == "__main__":
    main()
