"""How far a training is from the same training in one plain process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

#: The largest relative difference of what is logged, and of weights, of three updates in float32. Each of 60 modules
#: of a model rounds by 6e-8, which is up to 4 sqrt(60) 6e-8 = 2e-6 in a loss; losses and norms of later steps are of
#: weights that differ too.
BAR = 1e-5
#: Of what a difference is relative to, at least: losses are logarithms, and differences of values of this order.
SMALLEST = 1.0
#: How the names of what is logged end that are times, which nobody compares.
TIMES = ("runtime", "per_second", "preparation_time", "time", "total_flos")

Log = Sequence[Mapping[str, float]]
Weights = Mapping[str, torch.Tensor]


def compared(logs: tuple[Log, Log], keys: Iterable[str], weights: tuple[Weights, Weights]) -> tuple[str, str]:
    """Hold a training to the plain one.

    Args:
        logs: What each has logged, the plain one first.
        keys: Which of it is compared.
        weights: What each has trained.

    Returns:
        ``exact`` or ``wrong``, and how far they are apart.
    """
    keys = tuple(keys)
    pairs = [(theirs[key], ours[key], key) for theirs, ours in zip(*logs, strict=True) for key in keys if key in theirs]
    logged = max((abs(theirs - ours) / max(abs(theirs), SMALLEST), key) for theirs, ours, key in pairs)
    first, second = weights
    if first.keys() != second.keys():
        return "wrong", f"names of weights differ: {sorted(first.keys() ^ second.keys())[:4]}"
    scale = max(float(value.abs().max()) for value in first.values())
    away = max(float((first[name] - second[name]).abs().max()) for name in first) / scale
    said = f"logged within {logged[0]:.1e} ({logged[1]}), weights {away:.1e}"
    return ("exact" if logged[0] <= BAR and away <= BAR else "wrong"), said
