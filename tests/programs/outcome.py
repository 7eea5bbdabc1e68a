"""What a run of a program leaves behind, and the difference between two of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.programs.log import Log

#: The largest error, relative to the largest element of the reference or a thousandth of the largest gradient.
ALLOWED = 1e-10
#: So many times what one rounding of the inputs changes, where that is more: a run rounds more often than once.
ROUNDINGS = 100
#: But no more than this of the same scale: a rounding that flips a branch, or makes a number infinite, excuses nothing.
EXCUSED = 1e-6
#: What is left where equal numbers are subtracted, in terms of the largest number that the model returned beside it: a
#: tensor, or a loss, of nothing else has no scale of its own.
LEFT_OVER = 100 * torch.finfo(torch.float64).eps


@dataclasses.dataclass
class Outcome:
    """What a run left behind, by name."""

    values: dict[str, Any]


@dataclasses.dataclass
class Left:
    """What a run left behind on one rank.

    Attributes:
        values: Gradients, parameters, buffers and what else its modules keep, by name.
        losses: What the step functions returned.
        seen: What hooks saw, and kept gradients.
        finals: What the model returned, and the gradients of its inputs, by microbatch.
        sent: How many requests it sent, by kind.
        steps: The numbers of the library's steps that were not taken back.
        replica: The data-parallel replica of the rank.
        shares: Gradients of which each replica has its share, by name.
    """

    values: dict[str, Any]
    losses: list[torch.Tensor]
    seen: dict[str, list[torch.Tensor | None]] = dataclasses.field(default_factory=dict)
    finals: dict[str, list[torch.Tensor | None]] = dataclasses.field(default_factory=dict)
    sent: dict[str, int] = dataclasses.field(default_factory=dict)
    steps: set[int] = dataclasses.field(default_factory=set)
    replica: int = 0
    shares: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)

    def extend(self, later: Left) -> None:
        """Take over what the next job of the same rank left."""
        self.values |= later.values
        self.losses += later.losses
        self.finals |= later.finals
        self.shares |= later.shares
        self.steps |= later.steps
        for name, gradients in later.seen.items():
            self.seen.setdefault(name, []).extend(gradients)
        for kind, count in later.sent.items():
            self.sent[kind] = self.sent.get(kind, 0) + count

    def add_log(self, log: Log) -> None:
        """Take over what a log has of the run."""
        log.ended |= self.steps
        self.seen, self.finals = log.seen(), log.finals


def of_replicas(ranks: list[Left]) -> list[Outcome]:
    """The outcome on each replica, with whole gradients.

    Raises:
        AssertionError: Two ranks of a replica hold the same.
    """
    whole: dict[str, torch.Tensor | None] = {}
    for left in ranks:
        for name, part in left.shares.items():
            known = whole.get(name)
            whole[name] = part if known is None else known if part is None else known + part
    for left in ranks:
        left.values |= {name: whole[name] for name in left.shares}
    return [merged([one for one in ranks if one.replica == replica]) for replica in sorted({r.replica for r in ranks})]


def merged(ranks: list[Left]) -> Outcome:
    """The outcome of a run from what it left on its ranks.

    Raises:
        AssertionError: Two ranks hold the same.
    """
    values: dict[str, Any] = {}
    seen: dict[str, list[torch.Tensor | None]] = {}
    for rank, left in enumerate(ranks):
        if values.keys() & left.values.keys():
            raise AssertionError(f"rank {rank} holds {values.keys() & left.values.keys()} too")
        values |= left.values
        for name, gradients in left.seen.items():
            seen.setdefault(name, []).extend(gradients)
        for name, tensors in left.finals.items():
            values |= {f"{name}, tensor {index}": tensor for index, tensor in enumerate(tensors)}
    values |= {f"loss {index}": loss for index, loss in enumerate(ranks[-1].losses)}
    for name, gradients in seen.items():
        # The order of independent ones is the engine's affair, that of microbatches the schedule's.
        values |= {f"{name} {index}": gradient for index, gradient in enumerate(sorted(gradients, key=_sorting))}
    return Outcome(values)


def _sorting(gradient: torch.Tensor | None) -> tuple[bool, tuple[int, ...], list[float]]:
    if gradient is None:
        return True, (), []
    values = gradient.abs().double().flatten()
    weighed = float(
        (values * torch.arange(1, values.numel() + 1)).sum()
    )  # those of a row of zeros with one number differ
    return (
        False,
        tuple(gradient.shape),
        [round(weighed, 6), *(round(value, 6) for value in gradient.flatten()[:50].tolist())],
    )


def difference(plain: Outcome, divided: Outcome, rounded: Sequence[Outcome] = ()) -> str | None:
    """The first difference, None when there is none; measured as in docs/design/parity.md.

    Args:
        plain: What plain torch gives.
        divided: What the library gives.
        rounded: What plain torch gives for inputs that differ by a rounding; so far from ``plain``, and no farther than
            :data:`ROUNDINGS` times, the library's values may be too.
    """
    beside = _largest_returned(plain)
    for name in dict.fromkeys([*plain.values, *divided.values]):
        expected, found = plain.values.get(name), divided.values.get(name)
        scale = max((floor for kind, floor in _floors(plain).items() if name.startswith(kind)), default=0.0)
        noise = max((_distance(expected, one.values.get(name)) for one in rounded), default=0.0)
        left_over = LEFT_OVER * beside.get("loss" if name.startswith("loss ") else name.partition(", tensor ")[0], 0.0)
        if not _agree(expected, found, scale, ROUNDINGS * noise, left_over):
            return f"{name}: {_short(expected)} in plain torch, {_short(found)} divided"
    return None


def _floors(plain: Outcome) -> dict[str, float]:
    """Of gradients, of those that hooks of parameters see, and of weights with buffers, a thousandth of the largest.

    Noise relative to noise says nothing.
    """
    kinds = {"gradient": [0.0], "parameter": [0.0], "value of": [0.0]}
    for name, value in plain.values.items():
        for kind, found in kinds.items():
            if (
                name.startswith(kind)
                and isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.numel()
            ):
                found.append(float(value.abs().double().nan_to_num(posinf=0.0).max()))
    return {kind: max(found) / 1000 for kind, found in kinds.items()}


def _largest_returned(plain: Outcome) -> dict[str, float]:
    """By microbatch, the largest number among what the model returned; of all, for losses, which are sums of such."""
    found: dict[str, float] = {}
    for name, value in plain.values.items():
        microbatch, is_returned, _ = name.partition(", tensor ")
        if is_returned and isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            most = float(value.detach().abs().double().nan_to_num(posinf=0.0).max())
            found[microbatch] = max(found.get(microbatch, 0.0), most)
            found["loss"] = max(found.get("loss", 0.0), most)
    return found


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() > 6:
        return f"{tuple(value.shape)} {value.dtype} {[float(v) for v in value.flatten()[:3]]}..."
    return str(value)


def _distance(expected: Any, found: Any) -> float:
    """The largest difference of two values' numbers, in tensors and outside them; 0 where they cannot be compared."""
    if isinstance(expected, float) and isinstance(found, float):
        return abs(expected - found) if math.isfinite(expected - found) else 0.0
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return max((_distance(*pair) for pair in zip(expected, found, strict=True)), default=0.0)
    if isinstance(expected, dict) and isinstance(found, dict):
        return max((_distance(value, found.get(key)) for key, value in expected.items()), default=0.0)
    if not (isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor) and expected.shape == found.shape):
        return 0.0
    if not expected.is_floating_point() or not expected.numel():
        return 0.0
    return float((expected - found).abs().nan_to_num().max())


def _agree(expected: Any, found: Any, floor: float, noise: float = 0.0, left_over: float = 0.0) -> bool:
    if type(expected) is not type(found):
        return False
    if isinstance(expected, list):
        pairs = zip(expected, found, strict=False)
        return len(expected) == len(found) and all(_agree(*pair, floor, noise) for pair in pairs)
    if isinstance(expected, dict):
        keys = expected.keys()
        return keys == found.keys() and all(_agree(expected[key], found[key], floor, noise) for key in keys)
    if isinstance(expected, float):
        scale = max(abs(expected), 1.0)
        return expected == found or abs(expected - found) <= max(ALLOWED * scale, min(noise, EXCUSED * scale))
    if not isinstance(expected, torch.Tensor):
        return bool(expected == found)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()) or not torch.equal(
        expected[~finite].nan_to_num(), found[~finite].nan_to_num()
    ):
        return False
    expected, found = expected[finite], found[finite]
    if not expected.numel():
        return True
    scale = max(float(expected.abs().max()), floor)
    excused = min(noise, max(EXCUSED * scale, left_over))
    return float((expected - found).abs().max()) <= max(ALLOWED * scale, excused)
