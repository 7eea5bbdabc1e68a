"""What the library costs a step of one rank: GPT-2 XL in bf16, plain, ours, and plain again."""

from __future__ import annotations

import statistics
from typing import Any

import shardwright as smp
import torch
from torch import nn

from benches import overhead
from benches.gpt2.model import make_batch, make_model
from tests.parity.compare import Comparison
from tools.gpu_day.findings import Findings
from tools.gpu_day.options import Options

#: Of our step, in steps of plain PyTorch.
MOST = 1.01
#: Of the largest gradient: kernels of attention add in any order, in bf16.
TOLERANCE = 5e-2
GPT2_XL = {"num_blocks": 48, "width": 1600, "num_heads": 25, "sequence": 1024, "vocabulary": 50257}
TINY = {"num_blocks": 2, "width": 32, "num_heads": 2, "sequence": 16, "vocabulary": 64}
BATCH, WARM_UP, ROUNDS = 8, 3, 10


def run(options: Options) -> dict[str, Any]:
    """Time steps in turns, and compare their gradients."""
    size = TINY if options.tiny else GPT2_XL
    device = options.device
    batch = make_batch(BATCH, size["sequence"], size["vocabulary"]).to(device)
    models = [_model(size, device) for _ in range(2)]
    smp.init({"microbatches": overhead.MICROBATCHES})
    try:
        plain = overhead.plain_step(models[0], overhead.gpt2_loss, batch)
        ours = overhead.library_step(models[1], overhead.gpt2_loss, batch)

        def timed_plain() -> float:
            return overhead.timed(plain, models[0], device)

        def timed_ours() -> float:
            return overhead.timed(ours, models[1], device)

        for _ in range(WARM_UP):
            timed_plain(), timed_ours()
        findings = Findings()
        compared = Comparison()
        compared.gradients(_gradients(models[1]), _gradients(models[0]), "gradients")
        findings.add({"gradient_error": compared.worst})
        findings.expect(
            compared.worst <= TOLERANCE and not compared.failures,
            f"gradients are off by {compared.worst:.3g} at {compared.where} {'; '.join(compared.failures)}",
        )
        rounds = [(timed_plain(), timed_ours(), timed_plain()) for _ in range(3 if options.tiny else ROUNDS)]
    finally:
        smp.shutdown()
    before, own, after = (statistics.median(column) for column in zip(*rounds, strict=True))
    findings.add({"plain_seconds": before, "ours_seconds": own, "plain_again_seconds": after})
    findings.add({"plain_again_over_plain": statistics.median(third / first for first, _, third in rounds)})
    findings.add({"added_ms": 1e3 * statistics.median(own - (one + other) / 2 for one, own, other in rounds)})
    ratio = statistics.median(2 * own / (one + other) for one, own, other in rounds)
    findings.at_most("ours_over_plain", ratio, MOST, judged=device == "cuda" and not options.tiny)
    return findings.result()


def _model(size: dict[str, int], device: str) -> nn.Module:
    with torch.device(device):
        return make_model(**size).to(torch.bfloat16)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}
