"""The devices of this process: its accelerator, and the index of a device that is named without one."""

from __future__ import annotations

import functools
from typing import Any

import torch

_CPU = torch.device("cpu")


@functools.cache
def accelerator() -> str | None:
    """Return the type of the accelerator that this process can use, such as ``"cuda"``; None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def with_index(device: torch.device | str | int) -> torch.device:
    """Return a device as a tensor on it reports it.

    Tensors on an accelerator have a device with an index. Torch gives one to every tensor that has memory, but not to
    a tensor without memory (``_make_wrapper_subclass``). With such a tensor in a graph, the autograd engine looks for
    the queue of device -1.

    Args:
        device: A device; without an index it is the current one of its type.
    """
    found = torch.device(device)
    if found.index is None and found.type == accelerator():
        return torch.device(found.type, torch.accelerator.current_device_index())
    return found


def device_here(kind: str) -> torch.device:
    """Return the device on which this rank has a tensor that another rank has on a device of type ``kind``.

    Devices of an accelerator that this process does not have are replaced by the CPU. The index is this rank's own:
    ranks of a host may use different devices, and all call theirs number 0.
    """
    return with_index(kind) if kind == accelerator() else _CPU


def current_stream(device: torch.device) -> Any:
    """Return the calling thread's current stream of a CUDA device; None for another device."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
