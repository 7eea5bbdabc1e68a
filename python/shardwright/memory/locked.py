"""Host memory that is locked for devices."""

from __future__ import annotations

import torch

#: What PyTorch's allocator of locked memory has from the driver, in use or kept for the next use.
_OF_TORCH = "allocated_bytes.current"


def locked_bytes() -> int:
    """Return the bytes that PyTorch has locked in this process, for offloading, checkpoints and the script.

    Those of the transport are its own. 0 where no device is used, and with versions of PyTorch that do not tell.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    stats = getattr(torch.cuda, "host_memory_stats", None)
    return 0 if stats is None else int(stats().get(_OF_TORCH, 0))
