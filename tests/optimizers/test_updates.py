"""Fused optimizers update as their papers say, element by element, in plain Python."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn

Vector = list[float]


def norm(values: Vector) -> float:
    return math.sqrt(math.fsum(value * value for value in values))


class Lamb:
    """LAMB, algorithm 2 of arXiv:1904.00962."""

    def __init__(self, lr: float, decay: float, most: float, averaging: bool, in_update: bool, corrects: bool) -> None:
        self.lr, self.decay, self.most = lr, decay, most
        self.averaging, self.in_update, self.corrects = averaging, in_update, corrects
        self.moments: dict[int, tuple[Vector, Vector, int]] = {}

    def step(self, weights: list[Vector], gradients: list[Vector | None]) -> list[Vector]:
        whole = norm([value for gradient in gradients for value in gradient or []])
        factor = self.most / whole if self.most and whole > self.most else 1.0
        return [
            weight if gradient is None else self._one(index, weight, [value * factor for value in gradient])
            for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True))
        ]

    def _one(self, index: int, weight: Vector, gradient: Vector) -> Vector:
        m, v, t = self.moments.get(index, ([0.0] * len(weight), [0.0] * len(weight), 0))
        t += 1
        if not self.in_update:
            gradient = [g + self.decay * x for g, x in zip(gradient, weight, strict=True)]
        m = [0.9 * a + (0.1 if self.averaging else 1.0) * g for a, g in zip(m, gradient, strict=True)]
        v = [0.999 * a + 0.001 * g * g for a, g in zip(v, gradient, strict=True)]
        self.moments[index] = m, v, t
        first, second = (1 - 0.9**t, 1 - 0.999**t) if self.corrects else (1.0, 1.0)
        r = [a / first / (math.sqrt(b / second) + 1e-6) for a, b in zip(m, v, strict=True)]
        if self.in_update:
            r = [a + self.decay * x for a, x in zip(r, weight, strict=True)]
        ratio = norm(weight) / norm(r) if self.decay and norm(weight) and norm(r) else 1.0
        return [x - self.lr * ratio * a for x, a in zip(weight, r, strict=True)]


class NovoGrad:
    """NovoGrad, algorithm 1 of arXiv:1905.11286."""

    def __init__(self, lr: float, decay: float, averaging: bool, zero: bool) -> None:
        self.lr, self.decay, self.averaging, self.zero = lr, decay, averaging, zero
        self.moments: dict[int, tuple[Vector, float | None]] = {}

    def step(self, weights: list[Vector], gradients: list[Vector | None]) -> list[Vector]:
        return [
            weight if gradient is None else self._one(index, weight, gradient)
            for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True))
        ]

    def _one(self, index: int, weight: Vector, gradient: Vector) -> Vector:
        m, v = self.moments.get(index, ([0.0] * len(weight), 0.0 if self.zero else None))
        square = norm(gradient) ** 2
        v = square if v is None else 0.98 * v + 0.02 * square
        added = [g / (math.sqrt(v) + 1e-8) + self.decay * w for g, w in zip(gradient, weight, strict=True)]
        m = [0.95 * a + (0.05 if self.averaging else 1.0) * b for a, b in zip(m, added, strict=True)]
        self.moments[index] = m, v
        return [w - self.lr * a for w, a in zip(weight, m, strict=True)]


def compare(optimizer: Callable[[Any], torch.optim.Optimizer], plain: Any) -> None:
    """Six steps of four parameters: a matrix, a vector, one that starts at zero, one that has no gradient at times."""
    torch.manual_seed(0)
    shapes = [(3, 4), (5,), (4,), (2, 2)]
    parameters = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    nn.init.zeros_(parameters[2])
    ours = optimizer(parameters)
    weights = [parameter.detach().flatten().tolist() for parameter in parameters]
    for number in range(6):
        gradients: list[Vector | None] = []
        for index, parameter in enumerate(parameters):
            absent = index == 3 and number % 2 == 0
            parameter.grad = None if absent else torch.randn_like(parameter)
            gradients.append(None if absent else parameter.grad.flatten().tolist())
        ours.step()
        weights = plain.step(weights, gradients)
        for parameter, weight in zip(parameters, weights, strict=True):
            expected = torch.tensor(weight, dtype=torch.float64).view_as(parameter)
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("most", [0.0, 0.3])
@pytest.mark.parametrize(("averaging", "in_update", "corrects"), [(1, 1, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_lamb(decay: float, most: float, averaging: int, in_update: int, corrects: int) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return smp.optimizers.FusedLamb(
            parameters,
            lr=0.1,
            weight_decay=decay,
            max_grad_norm=most,
            grad_averaging=bool(averaging),
            adam_w_mode=bool(in_update),
            bias_correction=bool(corrects),
        )

    compare(optimizer, Lamb(0.1, decay, most, bool(averaging), bool(in_update), bool(corrects)))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("averaging", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_novograd(decay: float, averaging: bool, zero: bool) -> None:
    keys: dict[str, Any] = {"lr": 0.1, "weight_decay": decay, "grad_averaging": averaging, "init_zero": zero}
    compare(lambda parameters: smp.optimizers.FusedNovoGrad(parameters, **keys), NovoGrad(0.1, decay, averaging, zero))


@pytest.mark.parametrize("direct", [False, True])
def test_adam_is_that_of_torch(direct: bool) -> None:
    torch.manual_seed(0)
    start = torch.randn(7, 3)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = smp.optimizers.FusedAdam([ours], lr=0.1, weight_decay=0.1, adam_w_mode=direct)
    kind = torch.optim.AdamW if direct else torch.optim.Adam
    reference = kind([theirs], lr=0.1, weight_decay=0.1, foreach=False)
    for _ in range(5):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [smp.optimizers.FusedLamb, smp.optimizers.FusedNovoGrad])
def test_state_dicts_continue(make: Any) -> None:
    torch.manual_seed(0)
    first = nn.Parameter(torch.randn(4, 3))
    optimizer = make([first], lr=0.1)
    gradients = [torch.randn(4, 3) for _ in range(4)]
    for gradient in gradients[:2]:
        first.grad = gradient
        optimizer.step()
    second = nn.Parameter(first.detach().clone())
    other = make([second], lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch takes tensors over as they are
    for gradient in gradients[2:]:
        for parameter, one in ((first, optimizer), (second, other)):
            parameter.grad = gradient
            one.step()
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("make", "keys", "words"),
    [
        (smp.optimizers.FusedLamb, {"lr": -1.0}, "FusedLamb: lr is -1.0"),
        (smp.optimizers.FusedLamb, {"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
        (smp.optimizers.FusedNovoGrad, {"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
        (smp.optimizers.FusedNovoGrad, {"weight_decay": math.nan}, "weight_decay is nan"),
    ],
)
def test_bad_settings_are_refused(make: Any, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(smp.ConfigError, match=words):
        make([nn.Parameter(torch.ones(2))], **keys)


@pytest.mark.parametrize("make", [smp.optimizers.FusedLamb, smp.optimizers.FusedNovoGrad])
def test_sparse_gradients_are_refused(make: Any) -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = make([parameter])
    parameter.grad = torch.sparse_coo_tensor([[0]], [[1.0, 1.0]], (3, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
