"""Data and tensor parallelism over Gloo of two ranks that share a device, beside one process."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from shardwright.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2
from torch import nn

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
#: Gloo by the choice of the library, which sees that ranks share a device, and by its name.
CASES: dict[str, dict[str, Any]] = {
    f"{kind}_{backend}_{dtype}": {
        "keys": {"ddp": True, "ddp_dist_backend": backend, **keys},
        "dtype": dtype,
    }
    for kind, keys in {"data": {}, "tensor": {"tensor_parallel_degree": 2}}.items()
    for backend in ("auto", "gloo")
    for dtype in (("float64",) if backend == "auto" else ("float32",))
}


def run(options: Options) -> dict[str, Any]:
    """Train with replicas and with divided layers."""
    findings = Findings()
    for name, answers, error in run_cases(on_rank, CASES, options, seconds=SECONDS):
        findings.exact(name, answers, error)
        for answer in answers:
            findings.add({f"{name}_step_seconds": answer["step_seconds"]})
            findings.expect(answer["backend"] == "gloo", f"{name}: collectives go by way of {answer['backend']}")
    return findings.result()


def on_rank(options: Options) -> dict[str, Any]:
    """Be a rank."""
    return run_listed(options, train, CASES)


def train(options: Options, keys: dict[str, Any], dtype: str) -> dict[str, Any]:
    """What a rank does of one case."""
    repeatable()
    size, precision = TINY if options.tiny else SIZE, getattr(torch, dtype)
    ids = make_ids(size, options.device)
    divided = "tensor_parallel_degree" in keys
    expected = train_plain(
        make_gpt2(size, options.device, precision), ids.chunk(2 * size.microbatches), STEPS, sgd, language_loss
    )
    backends = []

    def make() -> nn.Module:
        model = make_gpt2(size, options.device, precision)
        for block in model.transformer.h if divided else ():
            smp.set_tensor_parallelism(block)
        return model

    found = train_ranks(
        {"microbatches": size.microbatches, **keys},
        make,
        ids,
        STEPS,
        sgd,
        language_loss,
        translate=translate_state_dict_to_hf_gpt2 if divided else dict,
        look=lambda: backends.append(torch.distributed.get_backend()),
    )
    return {**difference(found, expected, dtype), "backend": backends[0], "step_seconds": min(found.seconds)}
