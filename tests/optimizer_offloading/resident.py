"""A rank that updates parameters of 64 MiB, with large and small ones, and measures its memory.

usage: resident.py OFFLOAD DTYPE
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from pathlib import Path

import shardwright as smp
import torch
from shardwright.optimizer.offloading import chunks
from torch import nn

from tests.optimizer_offloading.problems import wrap

CHUNK_BYTES = 4 << 20
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024


def peak_of(step: object) -> tuple[int, int]:
    """Memory before a call, and the most during it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step()  # type: ignore[operator]
    return before, status("VmHWM")


def main() -> None:
    # Freed memory goes back to the system at once, so that resident memory is what is in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    mallopt = ctypes.CDLL(None).mallopt
    assert all(mallopt(what, 65536) for what in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
    chunks.CHUNK_BYTES = CHUNK_BYTES
    is_half = sys.argv[2] == "bf16"
    where = {"false": False, "disk": "disk"}[sys.argv[1]]
    smp.init({"offload_optimizer": where, **({"bf16": True} if is_half else {})})
    torch.manual_seed(1)
    # One that is cut, and some that fit into a chunk.
    module = nn.ParameterList([torch.randn(8 << 20), *(torch.randn(256, 1000) for _ in range(32))])
    model = smp.DistributedModel(module) if is_half else module
    parameters = list(model.parameters())
    optimizer = wrap(torch.optim.Adam(parameters, foreach=False))
    idle = status("VmRSS")
    peaks = []
    for number in range(3):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
        peaks.append(peak_of(optimizer.step))
        optimizer.zero_grad()
    report = smp.memory_report()[0]
    found = {
        "resident": status("VmRSS") - idle,
        "before_step": peaks[-1][0],
        "peak": peaks[-1][1],
        "first_peak": peaks[0][1],
        "state_bytes": report["measured"]["optimizer_state"] + report["offloaded_optimizer_state"],
        "offloaded_bytes": report["offloaded_optimizer_state"],
        "chunk_bytes": CHUNK_BYTES,
        "gradient_bytes": 4 * sum(one.numel() for one in parameters) if is_half else 0,
        "digest": [hashlib.sha256(one.detach().float().numpy().tobytes()).hexdigest() for one in parameters[:3]],
    }
    print("found: " + json.dumps(found), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
