"""Detects effects of microbatches: gradients of the whole batch may differ from those of its parts."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from shardwright.verify.measure import error_of, floor_of
from shardwright.verify.report import first_of

if TYPE_CHECKING:
    from shardwright.verify.compare import Comparison, NamedGradients

#: Another batch size leads to other kernels and other sums, so the tolerance is larger than between ranks and process.
_TOLERANCE_FACTOR = 10.0

_DROPOUTS = frozenset(
    (
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
    )
)


class _Watching(TorchFunctionMode):
    """Counts the labels of each cross entropy, and disables dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func in (functional.cross_entropy, functional.nll_loss):
            self._count(args[1] if len(args) > 1 else kwargs.get("target"), kwargs)
        return func(*args, **kwargs)

    def _count(self, target: Any, kwargs: Mapping[str, Any]) -> None:
        is_mean = kwargs.get("reduction", "mean") == "mean"
        if isinstance(target, torch.Tensor) and not target.is_floating_point() and is_mean:
            self.counts.append(int((target != kwargs.get("ignore_index", -100)).sum()))


def whole_batch_note(
    comparison: Comparison, gradients: NamedGradients, executed: Collection[str], tolerance: float
) -> list[str]:
    """Return notes about effects of the step's microbatches; an empty list if there are none.

    `gradients` are those with microbatches, in one process; `executed`, the paths of the modules that the step ran.
    """
    if all(gradient is None for gradient in gradients.values()):
        return []
    sources = sorted({source for drew in comparison.reference.flow.drew.values() for source in drew})
    if sources not in ([], ["torch"]):
        return [f"the whole batch was not compared with its microbatches, since {' and '.join(sources)} was drawn from"]
    count = comparison.num_microbatches
    by_parts = _run(comparison, count, _Watching())[0] if sources else gradients
    whole, _ = _run(comparison, 1, _Watching() if sources else None)
    name, error = _worst(by_parts, whole)
    # A step function that counts labels may multiply its loss by the number of microbatches, which differs here.
    counted = {key: None if gradient is None else gradient / count for key, gradient in whole.items()}
    error = min(error, _worst(by_parts, counted)[1])
    if error <= tolerance * _TOLERANCE_FACTOR:
        return []
    norms = [
        path
        for module, path in comparison.reference.paths.items()
        if isinstance(module, _BatchNorm) and module.training and path in executed
    ]
    return [_in_words(norms, name, error, _run(comparison, count, _Watching())[1])]


def _in_words(norms: list[str], name: str, error: float, counts: list[int]) -> str:
    reasons = []
    if len(set(counts)) > 1:
        shown = ", ".join(map(str, counts[:8])) + (", ..." if len(counts) > 8 else "")
        reasons.append(
            f"the numbers of labels differ ({shown}), and a mean of means is not the mean: give each microbatch's "
            "number to its backward, as in model.backward(loss, weight=(labels != -100).sum())"
        )
    if norms:
        reasons.append(
            f"batch normalisation ({first_of(norms)}) takes its statistics from a microbatch: use GroupNorm or "
            "LayerNorm, or one microbatch"
        )
    if not reasons:
        reasons.append(
            "the loss is not a mean over samples (a mean over what is masked, say), or something looks at several "
            "samples at once: sum the loss and divide by the count of the whole batch, or use one microbatch"
        )
    return (
        f"microbatches change the mathematics: with the whole batch as one microbatch the gradients differ by up to "
        f"{error:.1e} ({name}); the ranks compute what the microbatches ask for, one after another. Why: "
        f"{'; and '.join(reasons)}"
    )


def _run(comparison: Comparison, num_microbatches: int, mode: _Watching | None) -> tuple[NamedGradients, list[int]]:
    """Run every replica's batch in this many parts. Return the mean gradients, and the labels of each mean loss."""
    found, weights = [], []
    with mode or contextlib.nullcontext():
        for replica in comparison.replicas:
            weights.append(comparison.run(replica, num_microbatches, recorded=False).weight)
            found.append(comparison.reference.take_gradients())
    return comparison.reference.mean(found, weights, num_microbatches), [] if mode is None else mode.counts


def _worst(found: NamedGradients, expected: NamedGradients) -> tuple[str, float]:
    floor = floor_of(expected.values())
    errors = {name: error_of(found[name], wanted, floor)[0] for name, wanted in expected.items()}
    name = max(errors, key=errors.__getitem__)
    return name, errors[name]
