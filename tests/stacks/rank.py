"""Trains by several trainers, alone or as a rank: ``KINDS LAYOUT MICROBATCHES FOLDER [WHAT]``.

Kinds have commas between them. ``WHAT`` is ``killed``, while it saves after the second update, or ``resumed`` from the
newest checkpoint. Writes for each kind ``FOLDER/KIND-RANK.json``, with what was logged or raised, and the final weights
beside it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("CI", "true")

from tests.stacks import adapters, kinds
from tests.stacks.comparing import TIMES
from tests.stacks.layouts import LAYOUTS

KINDS = {**kinds.KINDS, **adapters.KINDS}


def logged(trainer: Any) -> list[dict[str, float]]:
    """What was logged, without times."""
    return [
        {key: value for key, value in entry.items() if not key.endswith(TIMES)} for entry in trainer.state.log_history
    ]


def saves(over: Any, what: str, rank: int) -> Any:
    """Make classes of trainers that save after each update, and of which the last rank may be killed in the second."""

    def saving(kind: Any) -> Any:
        if not issubclass(kind, transformers.Trainer):
            return over(kind)

        class Saving(over(kind)):  # type: ignore[misc]
            def __init__(self, *args: Any, **keywords: Any) -> None:
                super().__init__(*args, **keywords)
                self.args.save_strategy = transformers.trainer_utils.SaveStrategy.STEPS
                self.args.save_steps = self.state.save_steps = 1

            def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
                if what == "killed" and self.state.global_step == 2 and rank == smp.size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                super()._save_optimizer_and_scheduler(output_dir)

        return Saving

    import shardwright as smp

    return saving


def trained(
    kind: str, over: Any, folder: Path, replicas: int, what: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train, and return what was logged, the metrics of an evaluation, and the final weights."""
    trainer = KINDS[kind](over, folder, replicas)
    trainer.train(resume_from_checkpoint=True if what == "resumed" else None)
    divided = getattr(trainer, "distributed_model", None)
    whole = trainer.model.state_dict() if divided is None else trainer.accelerator.get_state_dict(divided)
    of_torchao = {name for name, one in whole.items() if type(one).__module__.startswith("torchao.")}
    state = {name: one.dequantize() if name in of_torchao else one.detach().clone() for name, one in whole.items()}
    metrics = trainer.evaluate()
    log = [entry for entry in logged(trainer) if "loss" in entry]
    return {"log": log, "eval_loss": metrics["eval_loss"]}, state


def main() -> None:
    """Run as the arguments say."""
    kinds, layout_name, microbatches, folder = sys.argv[1].split(","), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    what = sys.argv[5] if len(sys.argv) > 5 else ""
    rank, replicas, over = 0, 1, lambda kind: kind
    if layout_name != "plain":
        import shardwright as smp
        from shardwright.huggingface import over_ranks

        layout = LAYOUTS[layout_name]
        smp.init({**layout, "microbatches": microbatches, "deterministic_server": True, "stall_timeout_seconds": 60})
        rank, over = smp.rank(), over_ranks  # type: ignore[assignment]
        replicas = smp.rdp_size() if layout.get("prescaled_batch") else smp.dp_size()
        over = saves(over_ranks, what, rank) if what else over
    for kind in kinds:
        began = time.monotonic()
        try:
            report, state = trained(kind, over, folder / kind, replicas, what)
            if rank == 0:
                torch.save(state, folder / f"{kind}.pt")
        except Exception as error:
            traceback.print_exc()
            report = {"error": f"{type(error).__name__}: {error}"}
        report["seconds"] = time.monotonic() - began
        (folder / f"{kind}-{rank}.json").write_text(json.dumps(report))
        if "error" in report and layout_name != "plain":
            sys.exit(1)


if __name__ == "__main__":
    main()
