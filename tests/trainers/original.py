"""A script that trains by ``transformers.Trainer``: alone, or as it is on its path for the original library.

usage: python -m tests.trainers.original KIND LAYOUT DTYPE FOLDER

Writes what it has seen to FOLDER/RANK.json. A rank trains a second time, and resumes that twice in the middle.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import is_sagemaker_mp_enabled

from tests.trainers.layouts import LAYOUTS
from tests.trainers.models import ORIGINAL, Samples, data
from tests.trainers.rank import EVERY, STEPS, arguments, seen, trained

#: Whole batches for every accumulation: transformers divides by the number of batches of a whole one.
SAMPLES = 32


def trainer_of(kinds: Any, name: str, layout: str, dtype: torch.dtype, folder: Path) -> Any:
    """A Trainer, whose model is the same in every process."""
    kind, replicas = ORIGINAL[name], LAYOUTS[layout].replicas
    torch.manual_seed(3)
    model = kind.build(0.0).to(dtype)
    if LAYOUTS[layout].tensor > 1:
        import smdistributed.modelparallel.torch as smp

        smp.set_tensor_parallelism(model)
    trained_on, evaluated = data(kind, dtype)
    return transformers.Trainer(
        model=model,
        args=arguments(kinds, kind, folder, replicas),
        train_dataset=Samples([trained_on[index] for index in range(SAMPLES)]),
        eval_dataset=evaluated,
        compute_metrics=kind.metrics,
    )


def main() -> None:
    """Train as the arguments say."""
    name, layout, dtype_name, folder = sys.argv[1:]
    dtype, kinds = getattr(torch, dtype_name), transformers
    if not is_sagemaker_mp_enabled():
        trainer = trainer_of(kinds, name, layout, dtype, Path(folder, "out"))
        before = trainer.evaluate()
        Path(folder, "0.json").write_text(json.dumps({**trained(trainer), "before": before["eval_even_loss"]}))
        return
    import smdistributed.modelparallel.torch as smp

    if not torch.cuda.is_available():  # of transformers' own, only those for GPUs work on this path
        from shardwright import huggingface as kinds
    trainer = trainer_of(kinds, name, layout, dtype, Path(folder, "out"))
    before = trainer.evaluate()
    report = {**trained(trainer), "before": before["eval_even_loss"]}
    model = trainer.model_wrapped
    report["sent"] = smp.stats()["server"]["total"]["sent"]
    report["bytes_sent"] = smp.comm_stats()["bytes_sent"]
    report["held"] = [sum(p.numel() for p in model.local_parameters()), sum(p.numel() for p in model.parameters())]
    report["replaced"] = sum(one.substitute is not None for one in model.tensor_parallelism_report())
    trainer.save_model(str(Path(folder, "saved")))
    whole = model.state_dict()
    for translate, _ in smp.state.module_manager.translate_functions:
        whole = translate(whole)
    if smp.rank() == 0:
        read = type(trainer.model).from_pretrained(Path(folder, "saved"), dtype=dtype).state_dict()
        assert all(torch.equal(value, whole[key]) for key, value in read.items()), "other weights were saved"

    first = trainer_of(kinds, name, layout, dtype, Path(folder, "resumed"))
    first.train()
    report["whole"] = seen(first)[:-1]
    for _ in range(2):
        again = trainer_of(kinds, name, layout, dtype, Path(folder, "resumed"))
        again.train(resume_from_checkpoint=str(Path(folder, "resumed", f"checkpoint-{EVERY}")))
        report["resumed"] = seen(again)[:-1]
        assert report["resumed"][-len(report["whole"]) :] == report["whole"], "resumed inexactly"
    again.train(resume_from_checkpoint=True)  # of the last one, at which nothing is left to do
    assert again.state.global_step == STEPS
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    smp.shutdown()


if __name__ == "__main__":
    main()
