"""One rank of a job that saves or loads: ``python -m tests.checkpoint.layouts.rank FOLDER CASES RESULTS``."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from shardwright.checkpoints.full import whole_in_one_process
from shardwright.job.runtime import current_runtime
from torch import nn

from tests.jobs.listed import write_rows
from tests.jobs.patience import HANG_SECONDS
from tests.parity.compare import Comparison
from tests.parity.table import row_of_failure
from tests.parity_tp.precision import compute_in_double

from .cases import LAYOUTS, LoadCase, SaveCase

STEPS, SAMPLES, LENGTH, WORDS = 3, 4, 5, 30
CASE_SECONDS = HANG_SECONDS


def build(model: str) -> nn.Module:
    """A tiny model, the same in every process, with tied weights."""
    import transformers as t

    torch.manual_seed(3)
    common: dict[str, Any] = {"use_cache": False}
    if model == "GPT-2":
        sizes = {"vocab_size": WORDS, "n_embd": 12, "n_layer": 3, "n_head": 2, "n_positions": 7}
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        made: Any = t.GPT2LMHeadModel(t.GPT2Config(**sizes, **drops, **common))
    else:
        sizes = {"vocab_size": WORDS, "d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2}
        others = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": True}
        made = t.T5ForConditionalGeneration(t.T5Config(**sizes, **others, **common))
    made = made.double()
    with torch.no_grad():  # no weight at a value that hides a fault
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, of which one decays."""
    named = dict(model.named_parameters())
    decays = [one for one in named.values() if one.dim() > 1]
    others = [one for one in named.values() if one.dim() < 2]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 5e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def batch(step: int) -> torch.Tensor:
    """The tokens of a step, of all ranks."""
    return torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(100 + step))


@functools.lru_cache(maxsize=4)
def uninterrupted(model: str) -> tuple[list[Mapping[str, torch.Tensor]], list[float]]:
    """What one process has before and after each step, and the losses."""
    module, losses = build(model), []
    optimizer = optimizer_of(module)
    states = [{name: value.clone() for name, value in module.state_dict().items()}]
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        tokens = batch(step)
        loss = module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        states.append({name: value.clone() for name, value in module.state_dict().items()})
    return states, losses


class Run:
    """A model in training on one rank."""

    def __init__(self, case: SaveCase) -> None:
        self.case = case
        self.comparison = Comparison()
        with smp.tensor_parallelism():
            module = build(case.problem)
        self.model = smp.DistributedModel(module)
        self.optimizer: Any = smp.DistributedOptimizer(optimizer_of(self.model.module))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=100)

    def train(self, first: int) -> None:
        """Three steps."""
        states, losses = uninterrupted(self.case.problem)
        model = self.model

        @smp.step
        def train_step(tokens: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
            model.backward(loss)
            return loss

        for step in range(first, first + STEPS):
            self.optimizer.zero_grad()
            tokens = batch(step).chunk(smp.dp_size())[smp.dp_rank()]
            loss = train_step(tokens).reduce_mean()
            mean = sum(smp.allgather(float(loss), smp.DP_GROUP)) / smp.dp_size()
            self.optimizer.step()
            self.scheduler.step()
            self.comparison.tensor(torch.tensor(mean), torch.tensor(losses[step]), 0.0, f"loss of step {step}")
        self.compare(states[first + STEPS], f"after step {first + STEPS}")

    def compare(self, expected: Mapping[str, torch.Tensor], where: str) -> None:
        """Hold the whole model against one process's, on rank 0."""
        found = whole_in_one_process(current_runtime(), "the comparison", self.model)
        if smp.rank() == 0:
            if set(found) != set(expected):
                self.comparison.fail(f"{where}: names differ: {sorted(set(found) ^ set(expected))}")
            else:
                self.comparison.gradients(found, expected, where)

    def row(self) -> dict[str, Any]:
        """What this rank tells."""
        sent = smp.stats()["server"]["total"]["sent"] if smp.pp_size() > 1 else {"forward": 0, "backward": 0}
        return {
            "case": self.case.name,
            "worst": self.comparison.worst,
            "where": self.comparison.where,
            "failures": self.comparison.failures,
            "parameters": sum(one.numel() for one in self.model.local_parameters()),
            "forward": sent["forward"],
            "backward": sent["backward"],
        }


def run_case(case: SaveCase, folder: Path) -> dict[str, Any]:
    """Run one case in a job of its own within these processes; this rank's row."""
    try:
        smp.init(LAYOUTS[case.layout].configuration)
        run = Run(case)
        if isinstance(case, LoadCase):
            content = smp.resume_from_checkpoint(folder / case.problem, case.source)
            run.scheduler.load_state_dict(content["scheduler"])
            run.train(STEPS)
        else:
            run.train(0)
            content = {"scheduler": run.scheduler.state_dict(), "step": STEPS}
            smp.save_checkpoint(folder / case.problem, case.layout, user_content=content)
        smp.barrier()
        return run.row()
    except Exception as error:
        traceback.print_exc()
        return row_of_failure(case.name, error)


def main() -> int:
    """Run the cases of a file, and write a row for each; end after one that raised, which may have left ranks apart."""
    compute_in_double()
    torch.set_num_threads(1)
    listed = json.loads(Path(sys.argv[2]).read_text())
    cases = (LoadCase(**fields) if "source" in fields else SaveCase(**fields) for fields in listed)
    return write_rows(lambda case: run_case(case, Path(sys.argv[1])), cases, CASE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
