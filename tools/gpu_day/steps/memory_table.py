"""The rows of ``make bench-memory`` on ranks that share a device: its memory, and the seconds of a step."""

from __future__ import annotations

import statistics
import time
from typing import Any

import shardwright as smp
import torch

from benches.memory.__main__ import TOLERANCE
from benches.memory.model import Size
from benches.memory.our_side import Shardwright
from benches.memory.rows import ROWS
from tools.gpu_day.cases import run_cases, run_listed
from tools.gpu_day.figures import synchronize
from tools.gpu_day.findings import Findings
from tools.gpu_day.options import Options
from tools.gpu_day.training import begin_peak

SECONDS = 55.0
RANKS = 2
#: Gloo brings all that replicas exchange through host memory, which decides how large a model may be here.
SIZE = Size(batch=16)
TINY = Size(width=32, heads=2, batch=4, microbatches=2, sequence=32, vocabulary=64)
#: The first step divides the model, the second makes the optimizer's state.
WARM_UP, ROUNDS, TINY_ROUNDS = 2, 3, 1
#: What the library's account explains of the peak.
ACCOUNT = ("parameters", "gradients", "optimizer_state", "activations", "buffers")
CASES: dict[str, dict[str, Any]] = {
    row.name: {"keys": row.options} for row in ROWS if row.side == "ours" and row.ranks == RANKS
}


def run(options: Options) -> dict[str, Any]:
    """Train as each row does."""
    findings = Findings()
    losses: dict[str, float] = {}
    for name, answers, error in run_cases(on_rank, CASES, options, seconds=SECONDS):
        findings.expect(not error, f"{name}: {error}")
        if not answers:
            continue
        losses[name] = statistics.mean(answer["loss"] for answer in answers)
        figures = {"step_seconds": max(answer["step_seconds"] for answer in answers)}
        for figure in ("peak_bytes", "reserved_bytes", "account_bytes", "optimizer_bytes", "offloaded_bytes"):
            figures[figure] = max(answer[figure] for answer in answers)
        findings.add(figures, f"{name}: ")
    first = next(iter(losses.values()), 0.0)
    for name, loss in losses.items():
        findings.expect(abs(loss / first - 1) <= TOLERANCE, f"{name}: the loss is {loss:.6g}, and was {first:.6g}")
    return findings.result()


def on_rank(options: Options) -> dict[str, Any]:
    """Be a rank."""
    return run_listed(options, train, CASES)


def train(options: Options, keys: dict[str, Any]) -> dict[str, Any]:
    """What a rank does of one row; on a device, the peak is that of its steps."""
    is_cuda = options.device == "cuda"
    before = begin_peak(options.device)
    size = TINY if options.tiny else SIZE
    try:
        row = Shardwright(**keys, size=Size(**{**vars(size), "device": options.device}))
        seconds = []
        loss = 0.0
        for number in range(WARM_UP + (TINY_ROUNDS if options.tiny else ROUNDS)):
            if number == WARM_UP and is_cuda:
                torch.cuda.reset_peak_memory_stats()
            row.barrier()
            began = time.perf_counter()
            loss = row.step()
            synchronize(options.device)
            seconds.append(time.perf_counter() - began)
        return {
            "loss": loss,
            "step_seconds": statistics.median(seconds[WARM_UP:]),
            "peak_bytes": torch.cuda.max_memory_allocated() - before if is_cuda else 0,
            "reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else 0,
            "account_bytes": sum(smp.memory_report()[smp.rank()]["measured"][kind] or 0 for kind in ACCOUNT),
            "optimizer_bytes": row.optimizer_bytes(),
            "offloaded_bytes": row.offloaded_bytes(),
        }
    finally:
        smp.shutdown()
