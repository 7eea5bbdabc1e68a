"""Corners of autograd and of modules: parameters that travel, custom functions, complex numbers, own buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from .models_control import WIDTH, dense, last, pins, simple
from .problem import Models, Phase, Problem


class Multiplies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(functional.linear(x, weight))
        return result


class ParameterAsArgument(nn.Module):
    """The caller's own parameter is given to modules on other ranks, twice, and used here too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.one, self.two = Multiplies(), Multiplies()

    def forward(self, x: torch.Tensor) -> Any:
        return self.two(self.one(x, self.weight), self.weight) + functional.linear(x, self.weight)


class GivesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x), self.inner.weight


class ParameterAsResult(nn.Module):
    """A module elsewhere returns its own parameter, with which the caller computes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = GivesWeight(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        y, weight = self.one(x)
        return self.two(functional.linear(y, weight.t())) + weight.diagonal()


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.inner(x))


class Complex(nn.Module):
    """Complex tensors cross, and so do their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Spectrum(), dense()
        self.phase = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> Any:
        return self.two(torch.fft.irfft(self.one(x) * self.phase, n=WIDTH))


class Normed(nn.Module):
    """Weights that are computed from others by a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.one = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.two = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.three = dense()

    def forward(self, x: torch.Tensor) -> Any:
        return self.three(self.two(self.one(x)))


class Counts(nn.Module):
    """Keeps buffers of its own: one set anew and one written in place in every forward."""

    total: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        self.total = 0.9 * self.total + y.detach().mean(0)
        self.calls += 1
        return y + self.total


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Counts(), Counts(), Counts()

    def forward(self, x: torch.Tensor) -> Any:
        return self.three(self.two(self.one(x)))


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.inner(x).chunk(3, dim=1))


class PartlyUsed(nn.Module):
    """Some results are used, some are not, one only for its shape; which ones changes with the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Many(), Many(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        first, second, _ = self.one(x)
        _, _, third = self.two(first if first.sum() > 0 else second)
        return self.three(third) + torch.ones_like(first)


class Cube(torch.autograd.Function):
    """A function whose node only its tensor keeps alive."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 0.5 * x + 0.1 * x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = gradient * (0.5 + 0.3 * x**2)
        return result


class Cubes(nn.Module):
    """Ends, and for its caller begins, with a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x: torch.Tensor) -> Any:
        return Cube.apply(self.inner(Cube.apply(x)))  # type: ignore[no-untyped-call]


class CustomFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Cubes(), Cubes(), Cubes()

    def forward(self, x: torch.Tensor) -> Any:
        return Cube.apply(self.three(Cube.apply(self.two(self.one(x)))))  # type: ignore[no-untyped-call]


class ManyHops(nn.Module):
    """Deep: many small calls to alternating ranks, each fed by the two before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(dense() for _ in range(12))

    def forward(self, x: torch.Tensor) -> Any:
        before = x
        for layer in self.layers:
            x, before = layer(x + 0.5 * before), x
        return x


class Listed(nn.Module):
    """Parameters in lists and dicts, read where they are not held."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH)), "b": nn.Parameter(torch.randn(WIDTH))})
        self.layers = nn.ModuleDict({"one": dense(), "two": dense(), "three": dense()})

    def forward(self, x: torch.Tensor) -> Any:
        for layer, scale in zip(self.layers.values(), self.scales, strict=True):
            x = layer(x * scale + self.shifts["a"])
        return x + self.shifts["b"]


class Single(nn.Module):
    """Computes in single precision, on another rank than those who compute in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x.float()).double()
        return result


class Precisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = dense(), Single()

    def forward(self, x: torch.Tensor) -> Any:
        return self.two(self.one(x)) * x


class LinearLast(nn.Module):
    """Gives what another rank computed, which nothing there needs any more."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = dense(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.two(self.one(x))


def retained_step(models: Models, x: torch.Tensor) -> Any:
    """Looks at the gradient of a result, which crosses back to where the step function runs."""
    output = models["model"](x)
    output.retain_grad()
    doubled = output * 2
    loss = doubled.square().mean() + output.sin().mean()
    models["model"].backward(loss)
    return loss, output.grad.clone()


def in_place_loss_step(models: Models, x: torch.Tensor) -> Any:
    """Writes to what the model returned before the loss."""
    output = models["model"](x)
    output.mul_(2).sub_(x)
    output[:, 0].zero_()
    loss = output.square().mean()
    models["model"].backward(loss)
    return loss


three = pins(one=1, two=last, three=1)

PROBLEMS: dict[str, Problem] = {
    "parameter as argument": simple(ParameterAsArgument, pins(one=1, two=last)),
    "parameter as result": simple(ParameterAsResult, pins(one=1, two=last)),
    "complex numbers": simple(Complex, pins(one=1, two=last)),
    "parametrized": simple(Normed, pins(one=1, two=1, three=last)),
    "own buffers": simple(Buffers, pins(two=1, three=last)),
    "partly used results": simple(PartlyUsed, pins(one=1, two=last)),
    "custom functions": simple(CustomFunctions, pins(two=1, three=last)),
    "many hops": simple(ManyHops, lambda pp: {f"model.layers.{i}": i % pp for i in range(12)}),
    "lists of parameters": simple(Listed, lambda pp: {"model.layers.one": 1, "model.layers.two": pp - 1}),
    "two precisions": simple(Precisions, pins(two=1)),
    "retained gradient": simple(Buffers, pins(three=1, two=last), phases=(Phase(body=retained_step),)),
    "in-place loss": simple(LinearLast, pins(one=last, two=1), phases=(Phase(body=in_place_loss_step),)),
}
