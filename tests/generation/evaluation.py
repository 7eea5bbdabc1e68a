"""Predictions of ``Seq2SeqTrainer`` by ``generate``."""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import shardwright as smp
import torch
from shardwright import huggingface

from .models import VOCABULARY, built


def predicts(microbatches: int) -> None:
    """They are those of one process, also for a last batch that microbatches do not divide."""
    plain = built("t5")
    smp.init({"pipeline_parallel_degree": 2, "microbatches": microbatches})
    random = torch.Generator().manual_seed(9)
    samples = [
        {name: torch.randint(3, VOCABULARY, (5,), generator=random) for name in ("input_ids", "labels")}
        for _ in range(7)
    ]
    with TemporaryDirectory() as folder:
        given: dict[str, Any] = {"output_dir": str(Path(folder)), "per_device_eval_batch_size": 4, "report_to": []}
        args = huggingface.Seq2SeqTrainingArguments(
            **given, predict_with_generate=True, generation_max_length=8, disable_tqdm=True
        )
        trainer = huggingface.Seq2SeqTrainer(model=copy.deepcopy(plain), args=args, eval_dataset=samples)
        found = torch.as_tensor(trainer.predict(samples).predictions)
    for row, sample in enumerate(samples):
        expected = plain.generate(sample["input_ids"][None], max_length=8, do_sample=False)[0]
        assert torch.equal(found[row, : len(expected)], expected), (row, found[row], expected)
    smp.shutdown()
