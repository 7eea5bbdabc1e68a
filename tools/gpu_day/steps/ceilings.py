"""What the device can do: rates of its memory, of copies between it and pinned host memory, and of matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tools.gpu_day.figures import seconds_of
from tools.gpu_day.options import Options

#: Copies and products that one timing covers, so that starting them does not count.
_REPEATED = 5


def _rate(amount: float, work: Callable[[], Any], device: str) -> float:
    """How much of something per second a device does, in units of 10^9."""

    def repeated() -> None:
        for _ in range(_REPEATED):
            work()

    return _REPEATED * amount / seconds_of(repeated, device, times=5, warm=2) / 1e9


def device_copy_gb_s(device: str, tiny: bool) -> float:
    """The rate of copies within a device's memory, in GB of payload per second; each byte is read and written.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: Whether small copies will do.
    """
    source = torch.full((1 << 20 if tiny else 2 << 30,), 1, dtype=torch.uint8, device=device)
    into = torch.zeros_like(source)
    rate = _rate(source.nbytes, lambda: into.copy_(source), device)
    if not bool(into.eq(1).all()):
        raise RuntimeError("a copy within the device's memory did not arrive")
    return rate


def host_copy_gb_s(device: str, tiny: bool, *, pinned: bool = True) -> dict[str, float]:
    """The rates of copies between host and device, in GB/s: ``to_device``, ``to_host``, and ``both`` at once.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: Whether small copies will do.
        pinned: Whether the host's memory is locked, on CUDA.
    """
    size = 1 << 20 if tiny else 1 << 28
    hosts = [torch.full((size,), 1, dtype=torch.uint8, pin_memory=pinned and device == "cuda") for _ in range(2)]
    devices = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if device == "cuda" else [None, None]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)

    found = {
        "to_device": _rate(size, lambda: devices[0].copy_(hosts[0], non_blocking=True), device),
        "to_host": _rate(size, lambda: hosts[1].copy_(devices[1], non_blocking=True), device),
        "both": _rate(2 * size, both, device),
    }
    if not bool(devices[0].eq(1).all()) or not bool(hosts[1].eq(0).all()):
        raise RuntimeError("a copy between host and device did not arrive")
    return found


def matrix_tflop_s(device: str, tiny: bool) -> float:
    """The rate of bf16 matrix products of random values, in 10^12 operations per second."""
    size = 64 if tiny else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    into = torch.empty_like(left)
    return _rate(2 * size**3, lambda: torch.mm(left, right, out=into), device) / 1e3


def run(options: Options) -> dict[str, Any]:
    """Measure all of them; it passes if every copy arrived."""
    found: dict[str, Any] = {"device_copy_gb_s": device_copy_gb_s(options.device, options.tiny)}
    found |= {f"pinned_{name}_gb_s": rate for name, rate in host_copy_gb_s(options.device, options.tiny).items()}
    pageable = host_copy_gb_s(options.device, options.tiny, pinned=False)
    found |= {f"pageable_{name}_gb_s": rate for name, rate in pageable.items()}
    found["bf16_matrix_tflop_s"] = matrix_tflop_s(options.device, options.tiny)
    if options.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"name": properties.name, "memory_gib": properties.total_memory / 2**30}
        found |= {
            "processors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return {"passed": all(rate > 0 for name, rate in found.items() if name.endswith("_s")), **found}
