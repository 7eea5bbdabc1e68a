"""Random number streams of a rank, as tensors."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shardwright.checkpoints.claims import wrong

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


def check(found: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Refuse states that generators do not take, by giving them to others.

    Raises:
        ShardwrightError: One is missing, or is none; names it.
    """
    now = streams()
    takers: dict[str, Callable[[torch.Tensor], object]] = {
        _TORCH: torch.Generator().set_state,
        _PYTHON: lambda state: random.Random().setstate(_of_python(state)),
        _NUMPY: lambda state: _numpy_generator().set_state(_of_numpy(state)),
    }
    for name, state in now.items():
        place, allowed = f"tensor {prefix + name!r}", f"{state.dtype} {list(state.shape)}, the state of a generator"
        if name not in found:
            if name in (_TORCH, _PYTHON):
                raise wrong(place, "missing", allowed)
            continue
        one = found[name]
        if one.dtype != state.dtype or one.shape != state.shape:
            raise wrong(place, f"{one.dtype} {list(one.shape)}", allowed)
        try:
            if (take := takers.get(name)) is not None:
                take(one)
        except Exception as error:
            raise wrong(place, f"{type(error).__name__}: {error}", allowed) from error


def _numpy_generator() -> Any:
    return np.random.RandomState()


def _of_numpy(state: torch.Tensor) -> dict[str, Any]:
    *key, pos, has_gauss, bits = state.tolist()
    return {
        "bit_generator": "MT19937",
        "state": {"key": np.array(key, dtype=np.uint32), "pos": pos},
        "has_gauss": has_gauss,
        "gauss": _float(bits),
    }


def _of_python(state: torch.Tensor) -> tuple[int, tuple[int, ...], float | None]:
    version, *words, has_gauss, bits = state.tolist()
    return version, tuple(words), _float(bits) if has_gauss else None


def restore(found: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to these states, which :func:`check` has seen."""
    if _CUDA in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found[_CUDA])
    if _NUMPY in found:
        np.random.set_state(_of_numpy(found[_NUMPY]))
    random.setstate(_of_python(found[_PYTHON]))
    torch.set_rng_state(found[_TORCH])


def _bits(cached: float | None) -> tuple[int, int]:
    """Whether there is a number, and its bits: the second of two that were drawn at once."""
    return (0, 0) if cached is None else (1, struct.unpack("<q", struct.pack("<d", cached))[0])


def _float(bits: int) -> float:
    found: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return found
