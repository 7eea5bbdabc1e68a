"""A checkpoint of state on the device beside ``torch.save`` and ``torch.load``, to the disk and back."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from torch import nn

from benches.checkpoint import ways
from benches.memory.__main__ import disk_bandwidth
from benches.resident import forget_peak, peak_bytes
from tools.gpu_day.figures import synchronize
from tools.gpu_day.findings import Findings
from tools.gpu_day.options import Options

#: A layer has 64 MiB.
WIDTH, LAYERS = 4096, 128
TINY_WIDTH, TINY_LAYERS = 64, 8
#: Where the disk is so slow that 8 GiB would take longer, the state is smaller.
DISK_SECONDS = 30.0
#: Of host memory above what the process has, the most that a save or a load may add: pinned buffers, and not the state.
MOST_HOST_BYTES = 1 << 30


def run(options: Options) -> dict[str, Any]:
    """Save and load, and compare."""
    findings = Findings()
    device = options.device
    width = TINY_WIDTH if options.tiny else WIDTH
    layers = _layers(findings, options, width * width * 4)
    with tempfile.TemporaryDirectory(prefix="gpu-day-checkpoint-") as scratch:
        folder = Path(scratch)
        smp.init({"microbatches": 1})
        try:
            torch.manual_seed(0)
            with torch.device(device):
                network = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            model = smp.DistributedModel(network)
            nbytes = sum(parameter.nbytes for parameter in network.parameters())
            sums = _sums(network)
            findings.add({"state_gib": nbytes / 2**30})

            def load_torch() -> None:
                state = torch.load(folder / "torch", weights_only=True, map_location=device)
                network.load_state_dict(state)

            actions: dict[str, Callable[[], object]] = {
                "save_ours": lambda: smp.save_checkpoint(folder / "ours", "step", model=model),
                "save_torch": lambda: ways.save_torch(network.state_dict(), folder / "torch"),
                "load_ours": lambda: smp.resume_from_checkpoint(folder / "ours", "step", model=model),
                "load_torch": load_torch,
            }
            for name, action in actions.items():
                if name.startswith("load"):
                    ways.forget(folder / name.removeprefix("load_"))
                    with torch.no_grad():
                        for parameter in network.parameters():
                            parameter.zero_()
                seconds, host = _measure(action, device)
                findings.add({"seconds": seconds, "gb_per_second": nbytes / seconds / 1e9}, f"{name}_")
                findings.add({"host_bytes": host}, f"{name}_")
                if name.startswith("load"):
                    findings.expect(_sums(network) == sums, f"{name} does not give what was saved")
                if name.endswith("ours"):
                    judged = device == "cuda" and not options.tiny
                    findings.at_most(f"{name}_host_bytes", host, MOST_HOST_BYTES, judged=judged)
        finally:
            smp.shutdown()
    for what in ("save", "load"):
        ours, theirs = (findings.figures[f"{what}_{who}_seconds"] for who in ("ours", "torch"))
        findings.add({f"{what}_times_as_fast_as_torch": theirs / ours})
    return findings.result()


def _layers(findings: Findings, options: Options, layer_bytes: int) -> int:
    """As many layers as the disk has room and the step has time for."""
    if options.tiny:
        return TINY_LAYERS
    writes, reads = disk_bandwidth()
    findings.add({"disk_writes_gb_per_second": writes / 1e9, "disk_reads_gb_per_second": reads / 1e9})
    time_for = DISK_SECONDS / (2 / writes + 2 / reads)
    room_for = shutil.disk_usage(tempfile.gettempdir()).free / 2.5
    return max(1, min(LAYERS, int(min(time_for, room_for) / layer_bytes)))


def _measure(action: Callable[[], object], device: str) -> tuple[float, int]:
    """Seconds, and the most host memory that it took besides what was there, pinned memory included."""
    if device == "cuda":
        torch.cuda.reset_peak_host_memory_stats()
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    synchronize(device)
    before = forget_peak()
    began = time.perf_counter()
    action()
    synchronize(device)
    seconds = time.perf_counter() - began
    host = peak_bytes() - before
    if device == "cuda":
        # The kernel may not count what the driver has locked; where it does, this counts it twice.
        host += torch.cuda.host_memory_stats()["allocated_bytes.peak"] - pinned
    return seconds, host


def _sums(network: nn.Module) -> list[int]:
    """A sum of the bits of each parameter."""
    return [int(parameter.detach().view(torch.int32).sum(dtype=torch.int64)) for parameter in network.parameters()]
