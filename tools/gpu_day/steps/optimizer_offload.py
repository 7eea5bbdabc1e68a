"""AdamW with its state in host memory and on a disk, beside the same with it on the device."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from torch import nn

from benches.gpt2.model import make_optimizer
from tools.gpu_day.findings import Findings
from tools.gpu_day.options import Options
from tools.gpu_day.steps.gradients import Block
from tools.gpu_day.training import Trained, begin_peak, difference, train_ranks

#: 201 M parameters, whose AdamW has 1.5 GiB of state.
BLOCKS, WIDTH = 12, 2048
TINY_BLOCKS, TINY_WIDTH = 4, 64
ROWS, MICROBATCHES, STEPS = 256, 2, 4
#: What stays on the device at most: a few chunks of the state, through which it passes.
MOST_LEFT_BYTES = 256 << 20
#: Twice on the device: only where both give the same bits, the others have to give them too.
WHERE: dict[str, bool | str] = {"device": False, "again": False, "host": True, "disk": "disk"}


def run(options: Options) -> dict[str, Any]:
    """Train with the state in each place."""
    findings = Findings()
    trained: dict[str, Trained] = {}
    sizes: dict[str, dict[str, int]] = {}
    for name, where in WHERE.items():
        try:
            trained[name], sizes[name] = _train(options, where)
        except Exception as error:
            findings.expect(False, f"{name}: {type(error).__name__}: {error}")
            continue
        findings.add({"step_seconds": min(trained[name].seconds), **sizes[name]}, f"{name}_")
        if name == "device" or "device" not in trained:
            continue
        compared = difference(trained[name], trained["device"], "float32")
        findings.exact(name, [compared], "")
        if name == "again":
            continue
        repeats = bool(findings.figures.get("again_bitwise"))
        findings.expect(compared["bitwise"] or not repeats, f"{name}: numbers differ from those without offloading")
        if options.device == "cuda":
            findings.expect(sizes[name]["out_bytes"] > 0, f"{name}: no state has left the device")
            before, after = sizes["device"], sizes[name]
            fallen = before["device_bytes"] - after["device_bytes"]
            findings.add({f"{name}_device_bytes_fell_by": fallen / before["state_bytes"]})
            findings.expect(
                before["state_bytes"] - fallen <= MOST_LEFT_BYTES,
                f"{name}: {fallen} bytes left the device, and the state has {before['state_bytes']}",
            )
            findings.expect(
                after["device_peak_bytes"] < before["device_peak_bytes"],
                f"{name}: the device's peak is {after['device_peak_bytes']}, and was {before['device_peak_bytes']}",
            )
        elif name == "disk":
            findings.expect(sizes[name]["out_bytes"] > 0, "no state is on the disk")
    return findings.result()


def _train(options: Options, where: bool | str) -> tuple[Trained, dict[str, int]]:
    device = options.device
    blocks, width = (TINY_BLOCKS, TINY_WIDTH) if options.tiny else (BLOCKS, WIDTH)
    before = begin_peak(device)

    def make() -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            return nn.Sequential(*(Block(width) for _ in range(blocks)))

    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(MICROBATCHES * ROWS, width, generator=generator).to(device)
    sizes: dict[str, int] = {}

    def look() -> None:
        account = smp.memory_report()[0]
        sizes.update(state_bytes=account["measured"]["optimizer_state"], out_bytes=account["offloaded_optimizer_state"])
        if device == "cuda":
            sizes.update(device_bytes=torch.cuda.memory_allocated() - before)
            sizes.update(device_peak_bytes=torch.cuda.max_memory_allocated() - before)

    keys = {"microbatches": MICROBATCHES, "offload_optimizer": where}
    return train_ranks(keys, make, batch, STEPS, make_optimizer, _loss, look=look), sizes


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss
