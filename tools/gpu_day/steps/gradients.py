"""Gradients of two ranks on one device beside one process, with large results that stay where they were made."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import shardwright as smp
import torch
from torch import nn

from benches.gpt2.our_side import place
from tools.gpu_day.cases import run_cases, run_listed
from tools.gpu_day.findings import Findings
from tools.gpu_day.options import Options
from tools.gpu_day.training import (
    Size,
    difference,
    language_loss,
    make_gpt2,
    make_ids,
    repeatable,
    sgd,
    train_plain,
    train_ranks,
)

SECONDS = 55.0
SIZE = Size(blocks=4, width=512, heads=8, sequence=128, batch=8, microbatches=4)
TINY = Size(blocks=4, width=32, heads=2, sequence=8, batch=8, microbatches=4, vocabulary=64)
#: Static mode predicts from the second step on.
STEPS = 3
DTYPES = ("float64", "float32")
MODES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static_fast": {"static_mode": True, "fast_mode": True, "static_steps": 1},
}

CASES = {
    f"{model}_{mode}_{dtype}{'_checkpointing' if checkpointing else ''}": {
        "model": model,
        "mode": mode,
        "dtype": dtype,
        "checkpointing": checkpointing,
    }
    for dtype, model, mode, checkpointing in itertools.product(DTYPES, ("crossing", "gpt2"), MODES, (False, True))
    if dtype == "float64" or not checkpointing
}


class Block(nn.Module):
    """Something with weights on both sides of a nonlinearity."""

    def __init__(self, width: int) -> None:
        """Of this width."""
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        return x + self.outer(torch.tanh(self.inner(x)))


class Crossing(nn.Module):
    """Rank 0 hands results of rank 1, which it does not look at, to other modules of rank 1, and uses one late."""

    def __init__(self, width: int) -> None:
        """The modules ``there`` are for rank 1."""
        super().__init__()
        self.here, self.last = Block(width), Block(width)
        self.there = nn.ModuleDict({name: Block(width) for name in ("made", "once", "twice")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        made = self.there["made"](self.here(x))
        once, twice = self.there["once"](made), self.there["twice"](made)
        return self.last(once * 0.5 + twice) * made


def run(options: Options) -> dict[str, Any]:
    """Train both models in every mode and in both precisions, in double precision with checkpointing as well."""
    findings = Findings()
    for name, answers, error in run_cases(on_rank, CASES, options, seconds=SECONDS):
        findings.exact(name, answers, error)
        for rank, answer in enumerate(answers):
            findings.expect(answer["gradients"] > 0, f"{name}: rank {rank} has no gradients")
    return findings.result()


def on_rank(options: Options) -> dict[str, Any]:
    """Be a rank."""
    return run_listed(options, train, CASES)


def train(options: Options, model: str, mode: str, dtype: str, checkpointing: bool) -> dict[str, Any]:
    """What a rank does of one case."""
    repeatable()
    size = TINY if options.tiny else SIZE
    ids = make_ids(size, options.device)
    precision = getattr(torch, dtype)
    batch = ids if model == "gpt2" else torch.sin(ids.to(precision)).unsqueeze(-1) * torch.ones(size.width).to(ids)
    loss_of = language_loss if model == "gpt2" else _square_loss

    # Products of activations make errors grow, which a small rate keeps from showing.
    optimizer_of = functools.partial(sgd, rate=0.5 if model == "gpt2" else 0.01)

    def make() -> nn.Module:
        if model == "gpt2":
            return make_gpt2(size, options.device, precision)
        torch.manual_seed(0)
        with torch.device(options.device):
            return Crossing(size.width).to(precision)

    def placed() -> nn.Module:
        module: Any = make()
        if model == "gpt2":
            place(module, "01010")
            checkpointed = list(module.transformer.h)
        else:
            smp.set_partition(module.there, 1)
            checkpointed = [module.here, *module.there.values()]
        for part in checkpointed if checkpointing else ():
            smp.set_activation_checkpointing(part)
        return module  # type: ignore[no-any-return]

    expected = train_plain(make(), batch.chunk(size.microbatches), STEPS, optimizer_of, loss_of)
    keys = {
        "pipeline_parallel_degree": 2,
        "microbatches": size.microbatches,
        "auto_partition": False,
        "default_partition": 0,
        **MODES[mode],
    }
    found = train_ranks(keys, placed, batch, STEPS, optimizer_of, loss_of)
    return difference(found, expected, dtype)


def _square_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss
