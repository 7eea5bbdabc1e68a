"""A process that trains by Trainer: alone by that of transformers, or a rank by ours.

usage: python -m tests.trainers.rank KIND LAYOUT DTYPE FOLDER

Writes what it has seen to FOLDER/RANK.json. A rank trains a second time, with dropout, and resumes that in the middle.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.trainers.layouts import LAYOUTS, Layout
from tests.trainers.models import KINDS, Kind, data

BATCH, STEPS, EVERY = 8, 6, 2


def arguments(kinds: Any, kind: Kind, folder: Path, replicas: int) -> Any:
    """The arguments of a training: batches of the same size over all replicas."""
    made = kinds.Seq2SeqTrainingArguments if kind.generates else kinds.TrainingArguments
    more = {"predict_with_generate": True, "generation_max_length": 8} if kind.generates else {}
    return made(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // replicas,
        per_device_eval_batch_size=BATCH // replicas,
        gradient_accumulation_steps=kind.accumulated,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=EVERY,
        save_strategy="steps",
        save_steps=EVERY,
        logging_steps=1,
        learning_rate=3e-3,
        weight_decay=0.1,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        max_grad_norm=0.5,
        load_best_model_at_end=True,
        metric_for_best_model="even_loss",
        seed=7,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )


def trainer_of(kinds: Any, kind: Kind, dtype: torch.dtype, folder: Path, layout: Layout, dropout: float) -> Any:
    """A Trainer, whose model is the same in every process."""
    torch.manual_seed(3)
    model = kind.build(dropout).to(dtype)
    trained, evaluated = data(kind, dtype)
    return (kinds.Seq2SeqTrainer if kind.generates else kinds.Trainer)(
        model=model,
        args=arguments(kinds, kind, folder, layout.replicas),
        train_dataset=trained,
        eval_dataset=evaluated,
        compute_metrics=kind.metrics,
    )


_TIMES = ("runtime", "per_second", "preparation_time")


def seen(trainer: Any) -> list[dict[str, float]]:
    """What was logged, without times."""
    return [
        {key: value for key, value in entry.items() if not key.endswith(_TIMES) and key != "total_flos"}
        for entry in trainer.state.log_history
    ]


def trained(trainer: Any) -> dict[str, Any]:
    """Train to the end, and predict."""
    result = trainer.train()
    predicted = trainer.predict(trainer.eval_dataset["odd"])
    return {
        "log": seen(trainer),
        "train_loss": result.training_loss,
        "generates": getattr(trainer.args, "predict_with_generate", False),
        "best": Path(trainer.state.best_model_checkpoint).name,
        "predicted": {key: value for key, value in predicted.metrics.items() if not key.endswith(_TIMES)},
    }


def main() -> None:
    """Train as the arguments say."""
    name, layout_name, dtype_name, folder = sys.argv[1:]
    kind, layout, dtype = KINDS[name], LAYOUTS[layout_name], getattr(torch, dtype_name)
    if layout_name == "plain":
        import transformers

        trainer = trainer_of(transformers, kind, dtype, Path(folder, "out"), layout, 0.0)
        Path(folder, "0.json").write_text(json.dumps(trained(trainer)))
        return
    import shardwright as smp
    from shardwright import huggingface

    smp.init(layout.config)
    trainer = trainer_of(huggingface, kind, dtype, Path(folder, "out"), layout, 0.0)
    report = trained(trainer)
    model = trainer.distributed_model
    stats = smp.stats()
    report["sent"] = stats["server"]["total"]["sent"]
    report["bytes_sent"] = smp.comm_stats()["bytes_sent"]
    report["held"] = [sum(p.numel() for p in model.local_parameters()), sum(p.numel() for p in model.parameters())]
    report["replaced"] = sum(one.substitute is not None for one in model.tensor_parallelism_report())
    trainer.save_model(str(Path(folder, "saved")))

    first = trainer_of(huggingface, kind, dtype, Path(folder, "resumed"), layout, 0.1)
    first.train()
    again = trainer_of(huggingface, kind, dtype, Path(folder, "resumed"), layout, 0.1)
    again.train(resume_from_checkpoint=str(Path(folder, "resumed", f"checkpoint-{EVERY}")))
    report["whole"], report["resumed"] = seen(first)[:-1], seen(again)[:-1]
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    smp.shutdown()


if __name__ == "__main__":
    main()
