"""Trainer in jobs with other keys of the configuration: losses as without them, and resumed exactly.

usage: python -m tests.trainers.keys FOLDER CONFIG

The last line of the output has the losses, and those of the training that was resumed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import shardwright as smp
import torch
import transformers
from shardwright import huggingface
from transformers.utils import is_sagemaker_mp_enabled

from tests.trainers.models import KINDS, ORIGINAL, data


def trainer_of(folder: str) -> Any:
    """A Trainer of GPT-2; that of transformers on its path for the original library."""
    torch.manual_seed(0)
    kinds, kind = (transformers, ORIGINAL["smp-gpt2"]) if is_sagemaker_mp_enabled() else (huggingface, KINDS["gpt2"])
    model, (samples, _) = kind.build(0.0), data(kind, torch.float32)
    args = huggingface.TrainingArguments(
        folder,
        per_device_train_batch_size=4 // smp.rdp_size(),
        gradient_accumulation_steps=2,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return kinds.Trainer(model=model, args=args, train_dataset=samples)


def main() -> None:
    """Train, resume, tell."""
    folder, config = sys.argv[1:]
    smp.init({"microbatches": 2, "deterministic_server": True, **json.loads(config)})
    first = trainer_of(folder)
    first.train()
    again = trainer_of(folder)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    logs = [[entry for entry in one.state.log_history if "loss" in entry] for one in (first, again)]
    print(json.dumps({"log": logs[0], "resumed": logs[1]}))
    smp.shutdown()


if __name__ == "__main__":
    main()
