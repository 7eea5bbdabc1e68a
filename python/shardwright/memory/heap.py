"""How the C library keeps the memory of tensors, on CPU ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwright import _core

#: From this size on, what is freed goes back to the system.
_LARGE_BYTES = 1 << 20


def give_back_large(device: torch.device, environment: Mapping[str, str]) -> None:
    """Have the C library return large tensors' memory to the system when they are freed, unless users say otherwise.

    By itself it keeps freed allocations of up to 32 MiB in its heaps, one for each thread, between others that live on:
    a rank whose workers allocate weights, gradients and activations in turn then holds about twice what it uses.

    Args:
        device: What the rank's tensors are on; nothing is changed if they are not in host memory.
        environment: The environment variables, of which those for the C library come first.
    """
    by_user = "MALLOC_MMAP_THRESHOLD_" in environment or "mmap_threshold" in environment.get("GLIBC_TUNABLES", "")
    if device.type == "cpu" and not by_user:
        _core.map_large_allocations(_LARGE_BYTES)
