"""A training on transformers' path for the original library in which one rank fails.

usage: python -m tests.trainers.original_failing RANK WHERE FOLDER

WHERE is ``data``, ``callback`` or ``metrics``.
"""

from __future__ import annotations

import sys
from typing import Any

import smdistributed.modelparallel.torch as smp
import torch
import transformers
from shardwright import huggingface

from tests.trainers.models import ORIGINAL, Samples, data


def main() -> None:
    """Train until it fails."""
    rank, where, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]

    def fail(place: str) -> None:
        if smp.rank() == rank and place == where:
            raise ValueError("this rank is told to fail")

    class Fails(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2:
                fail("callback")

    class Failing(Samples):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            if index == 17:
                fail("data")
            return super().__getitem__(index)

    def metrics(_: Any) -> dict[str, float]:
        fail("metrics")
        return {}

    kind = ORIGINAL["smp-gpt2"]
    torch.manual_seed(0)
    samples = data(kind, torch.float32)[0]
    trainer = transformers.Trainer(
        model=kind.build(0.0),
        args=huggingface.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            max_steps=40,
            eval_strategy="steps",
            eval_steps=3,
            train_sampling_strategy="sequential",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Failing([samples[index] for index in range(40)]),
        eval_dataset=Samples([samples[index] for index in range(8)]),
        compute_metrics=metrics,
        callbacks=[Fails()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
