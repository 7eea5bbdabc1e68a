"""A checkpointed GPT-2 with its activations in host memory, beside the same without."""

from __future__ import annotations

import statistics
import time
from typing import Any

import shardwright as smp
import torch
from shardwright.job.runtime import find_runtime
from shardwright.offloading.activations import OffloadedActivations
from torch import nn

from benches.gpt2.model import make_batch, make_model
from tools.gpu_day.figures import seconds_of, synchronize
from tools.gpu_day.findings import Findings
from tools.gpu_day.options import Options
from tools.gpu_day.training import begin_peak, relative

#: As wide that PCIe can bring out what a block's forward computes: 24 * width operations for each byte pair.
SIZE = {"num_blocks": 24, "width": 2048, "num_heads": 16, "sequence": 1024, "vocabulary": 8192}
TINY = {"num_blocks": 8, "width": 64, "num_heads": 2, "sequence": 32, "vocabulary": 64}
BATCH, MICROBATCHES = 32, 4
TINY_BATCH = 8
WARM_UP, ROUNDS, TINY_ROUNDS = 2, 4, 1
#: Of a step without.
MOST = 1.05
#: A transfer that takes more than this of the time it may take beside the computation is not hidden by it.
HIDDEN = 0.8
#: Of the operations of a step: a forward, then a forward and a backward of twice as much.
FORWARD = 0.25
#: Losses in bf16.
TOLERANCE = 2e-2


def run(options: Options) -> dict[str, Any]:
    """Time steps without, with, and without again."""
    findings = Findings()
    off, on, again = (_train(options, where) for where in (False, True, False))
    without = statistics.mean((off["step_seconds"], again["step_seconds"]))
    findings.add({"off_seconds": off["step_seconds"], "off_again_seconds": again["step_seconds"]})
    findings.add({"on_seconds": on["step_seconds"], "moved_bytes": on["moved_bytes"]})
    findings.expect(on["moved_bytes"] > 0, "no activation was moved out")
    error = max(relative(own, other) for own, other in zip(on["losses"], off["losses"], strict=True))
    findings.add({"loss_error": error, "noise": _noise(off, again)})
    findings.expect(error <= TOLERANCE, f"losses are off by {error:.3g}")
    allowed = _within_pcie(findings, options, on["moved_bytes"], without)
    judged = options.device == "cuda" and not options.tiny
    findings.at_most("on_over_off", on["step_seconds"] / without, MOST, judged=judged and allowed)
    if options.device == "cuda":
        fallen = off["peak_bytes"] - on["peak_bytes"]
        findings.add({"off_peak_bytes": off["peak_bytes"], "on_peak_bytes": on["peak_bytes"]})
        findings.add({"most_out_bytes": on["most_out_bytes"]})
        findings.add({"peak_fell_by": fallen / max(on["most_out_bytes"], 1)})
        findings.expect(fallen > 0, f"the device's peak rose by {-fallen} bytes")
    return findings.result()


def _noise(off: dict[str, Any], again: dict[str, Any]) -> float:
    """How far two runs without offloading are apart."""
    return max(relative(own, other) for own, other in zip(again["losses"], off["losses"], strict=True))


def _within_pcie(findings: Findings, options: Options, moved: int, step_seconds: float) -> bool:
    """Note the rates of pinned copies; whether what is moved takes less time than what it is beside."""
    device = torch.device(options.device)
    nbytes = (1 << 20) if options.tiny else (256 << 20)
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    out = nbytes / seconds_of(lambda: here.copy_(there, non_blocking=True), options.device)
    back = nbytes / seconds_of(lambda: there.copy_(here, non_blocking=True), options.device)
    shares = moved / out / (FORWARD * step_seconds), moved / back / ((1 - FORWARD) * step_seconds)
    findings.add({"pcie_out_bytes_per_second": out, "pcie_back_bytes_per_second": back})
    findings.add({"share_of_pcie_out": shares[0], "share_of_pcie_back": shares[1]})
    findings.add({"pcie_allows_it": max(shares) <= HIDDEN})
    return max(shares) <= HIDDEN


def _train(options: Options, where: bool) -> dict[str, Any]:
    """Train some steps; what they took."""
    size, device = (TINY if options.tiny else SIZE), options.device
    before = begin_peak(device)
    smp.init({"microbatches": MICROBATCHES, "offload_activations": where})
    try:
        with torch.device(device):
            network = make_model(**size).to(torch.bfloat16)
        model: Any = smp.DistributedModel(network)
        for block in network.transformer.h:
            smp.set_activation_checkpointing(block)
        ids = make_batch(TINY_BATCH if options.tiny else BATCH, size["sequence"], size["vocabulary"]).to(device)

        @smp.step
        def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            loss = model(input_ids=ids, labels=ids).loss
            model.backward(loss)
            return loss.detach()

        steps = WARM_UP + (TINY_ROUNDS if options.tiny else ROUNDS)
        seconds, losses = [], []
        for number in range(steps):
            if number == WARM_UP and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            network.zero_grad()
            synchronize(device)
            began = time.perf_counter()
            loss = step(model, ids)
            synchronize(device)
            seconds.append(time.perf_counter() - began)
            losses.append(loss.reduce_mean().cpu())
        found: dict[str, Any] = {"step_seconds": statistics.median(seconds[WARM_UP:]), "losses": losses}
        offloaded = find_runtime().find(OffloadedActivations)
        found["moved_bytes"] = 0 if offloaded is None else offloaded.counts()["stored_bytes"] // steps
        found["most_out_bytes"] = smp.memory_report()[0]["offloaded"]
        if device == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        return found
    finally:
        smp.shutdown()
