"""Random number streams of a rank, as tensors."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_TORCH, _CUDA, _PYTHON, _NUMPY = "torch", "cuda", "python", "numpy"


def prefix(rank: int) -> str:
    """What the names of a rank's streams begin with."""
    return f"rng/{rank}/"


def streams() -> dict[str, torch.Tensor]:
    """Return the states of torch's generators, of Python's ``random`` and of NumPy's, by name."""
    version, words, gauss = random.getstate()
    found = {
        _TORCH: torch.get_rng_state(),
        _PYTHON: torch.tensor([version, *words, *_bits(gauss)], dtype=torch.int64),
    }
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        cached = state["gauss"] if state["has_gauss"] else None
        words = [*map(int, state["state"]["key"]), int(state["state"]["pos"]), *_bits(cached)]
        found[_NUMPY] = torch.tensor(words, dtype=torch.int64)
    if torch.cuda.is_available():
        found[_CUDA] = torch.cuda.get_rng_state()
    return found


def restore(found: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to these states."""
    if _CUDA in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found[_CUDA])
    if _NUMPY in found:
        *key, pos, has_gauss, bits = found[_NUMPY].tolist()
        np.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": np.array(key, dtype=np.uint32), "pos": pos},
                "has_gauss": has_gauss,
                "gauss": _float(bits),
            }
        )
    version, *state, has_gauss, bits = found[_PYTHON].tolist()
    random.setstate((version, tuple(state), _float(bits) if has_gauss else None))
    torch.set_rng_state(found[_TORCH])


def _bits(cached: float | None) -> tuple[int, int]:
    """Whether there is a number, and its bits: the second of two that were drawn at once."""
    return (0, 0) if cached is None else (1, struct.unpack("<q", struct.pack("<d", cached))[0])


def _float(bits: int) -> float:
    found: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return found
