"""Sharded data parallelism of two ranks that share a device, over Gloo, beside one process."""

from __future__ import annotations

from typing import Any

import torch

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

SECONDS = 45.0
SIZE = Size(blocks=4, width=512, heads=8, sequence=128, batch=16, microbatches=2)
TINY = Size(blocks=2, width=32, heads=2, sequence=8, batch=8, microbatches=2, vocabulary=64)
STEPS = 3
KEYS: dict[str, Any] = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 100,
    "sdp_gradient_clipping": 1e9,
}
CASES: dict[str, dict[str, Any]] = {
    f"stage_{stage}_{dtype}": {"stage": stage, "dtype": dtype} for stage in (2, 3) for dtype in ("float64", "float32")
}


def run(options: Options) -> dict[str, Any]:
    """Train at both stages, in both precisions."""
    findings = Findings()
    for name, answers, error in run_cases(on_rank, CASES, options, seconds=SECONDS):
        findings.exact(name, answers, error)
        for answer in answers:
            findings.add({f"{name}_step_seconds": answer["step_seconds"]})
    return findings.result()


def on_rank(options: Options) -> dict[str, Any]:
    """Be a rank."""
    return run_listed(options, train, CASES)


def train(options: Options, stage: int, dtype: str) -> dict[str, Any]:
    """What a rank does of one case."""
    repeatable()
    size, precision = TINY if options.tiny else SIZE, getattr(torch, dtype)
    ids = make_ids(size, options.device)

    def make() -> torch.nn.Module:
        return make_gpt2(size, options.device, precision)

    expected = train_plain(make(), ids.chunk(2 * size.microbatches), STEPS, sgd, language_loss)
    keys = {**KEYS, "microbatches": size.microbatches, "sdp_stage": stage}
    found = train_ranks(keys, make, ids, STEPS, sgd, language_loss)
    return {**difference(found, expected, dtype), "step_seconds": min(found.seconds)}
