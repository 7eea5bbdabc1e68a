"""What models do with autograd itself: functions and hooks of their own, checkpoints, gradients inside the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.parity.models_autograd import CustomFunctions
from tests.parity.models_control import WIDTH, dense

from .entry import Entry
from .entry_builders import module, numbered, spread


class Splits(torch.autograd.Function):
    """Two results, one of which has no gradient; one input is a number; one gradient is not always made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = x > 0
        ctx.save_for_backward(x, weight, kept)
        ctx.scale = scale
        ctx.mark_non_differentiable(kept)
        return torch.where(kept, x * weight * scale, x), kept

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: None) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:  # type: ignore[override]
        x, weight, kept = ctx.saved_tensors
        of_x = torch.where(kept, gradient * weight * ctx.scale, gradient) if ctx.needs_input_grad[0] else None
        return of_x, None, (gradient * x * ctx.scale * kept).sum(0) if ctx.needs_input_grad[2] else None


class Turns(torch.autograd.Function):
    """Writes to its input, and turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(1.5)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -1.5 * gradient


class SplitsAndTurns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, kept = Splits.apply(self.inner(x), 0.5, self.weight)  # type: ignore[no-untyped-call]
        return Turns.apply(y + x), kept  # type: ignore[no-untyped-call]


class Functions(nn.Module):
    """Custom functions at both ends of modules of other ranks, and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (SplitsAndTurns() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        x, first = self.one(x)
        x, second = self.two(Turns.apply(x * 1))  # type: ignore[no-untyped-call]
        x, third = self.three(x)
        x, fourth = self.four(x + 0)
        return x * (first & second) + x.sin() * (third | fourth)


class Recomputes(nn.Module):
    """Checkpoints of parts that lie on one rank, on several, on the rank of another, and one inside the other."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.Sequential(*(dense() for _ in range(4)))
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.late = Checkpointing(reentrant)

    def scaled(self, x: torch.Tensor, factor: float, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.layers[2](self.scale(x).tanh() * factor)
        return y if shift is None else y + shift

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=self.reentrant)
        x = checkpoint(self.scaled, x, 0.5, use_reentrant=self.reentrant)
        x = checkpoint(
            lambda y: self.scaled(checkpoint(self.layers[3], y, use_reentrant=self.reentrant), 1.5),
            x,
            use_reentrant=self.reentrant,
        )
        x = checkpoint_sequential(self.layers, 2, x, use_reentrant=self.reentrant)
        if not self.reentrant:
            x = checkpoint(self.scaled, x, 0.5, shift=x.mean(0), use_reentrant=False)
        return checkpoint(self.late, x, use_reentrant=self.reentrant)


class Checkpointing(nn.Module):
    """Checkpoints parts of itself wherever it runs."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.one, self.two = dense(), dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.one, x, use_reentrant=self.reentrant)
        result: torch.Tensor = checkpoint(self.two, y + x, use_reentrant=self.reentrant)
        return result


class Hooked(nn.Module):
    """Every kind of hook, on the model, on modules that lie on one rank and on modules that span ranks."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = dense(), dense()
        self.inner = nn.Sequential(dense(), dense())
        self.last = dense()
        self.register_buffer("calls", torch.zeros(()))
        for index, part in enumerate((self.one, self.two, self.inner, self.inner[1], self.last)):
            scale = 1 + 0.1 * index
            part.register_forward_pre_hook(before(scale))
            part.register_forward_pre_hook(before_with_keywords, with_kwargs=True)
            part.register_forward_hook(after(scale))
            part.register_forward_hook(after_with_keywords, with_kwargs=True, always_call=True)
            part.register_full_backward_hook(of_inputs(scale))
            part.register_full_backward_pre_hook(of_outputs(scale))
        self.register_forward_hook(self.count)
        self.one[0].weight.register_hook(lambda gradient: gradient * 2)
        self.last[0].weight.register_hook(lambda gradient: gradient * 3)
        self.two[0].bias.register_post_accumulate_grad_hook(mask)

    def count(self, hooked: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return result + 0.01

    def forward(self, x: torch.Tensor) -> Any:
        x = self.one(x)
        y = x * 2
        y.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        y = self.inner(self.two(y))
        y.register_hook(lambda gradient: gradient * 3)
        return self.last(y + y.sin())


def before(scale: float) -> Callable[..., Any]:
    return lambda hooked, args: (args[0] * scale,)


def before_with_keywords(hooked: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return (args[0] + 0.1, *args[1:]), kwargs


def after(scale: float) -> Callable[..., Any]:
    return lambda hooked, args, result: result * scale + 0.1 * args[0]


def after_with_keywords(hooked: nn.Module, args: Any, kwargs: dict[str, Any], result: torch.Tensor) -> Any:
    return result.cos()


def of_inputs(scale: float) -> Callable[..., Any]:
    return lambda hooked, inputs, outputs: None if inputs[0] is None else (inputs[0] * scale + outputs[0],)


def of_outputs(scale: float) -> Callable[..., Any]:
    return lambda hooked, outputs: (outputs[0] / scale,)


def mask(weight: torch.Tensor) -> None:
    """Holds one element still; the same after each microbatch as after the last."""
    assert weight.grad is not None
    weight.grad[0] = 0.0


class Ensemble(nn.Module):
    """Runs several networks as one, over their stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(dense() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = [name for name, _ in self.members[0].named_parameters()]
        stacked = {name: torch.stack([m.get_parameter(name) for m in self.members]) for name in names}
        result: torch.Tensor = vmap(lambda weights: functional_call(self.members[0], weights, (x,)))(stacked).mean(0)
        return result


class Differentiates(nn.Module):
    """Its result has the gradient of a function of its weights in it, per sample, and a derivative along its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = dense(), nn.Linear(WIDTH, 1)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.net(x)).squeeze(-1)
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forces = vmap(grad(self.energy))(x)
        _, along = jvp(self.energy, (x,), (torch.ones_like(x),))
        return x - 0.1 * forces + along[:, None]


class Adapts(nn.Module):
    """Takes one step of gradient descent on its own weight in the forward, and answers with the new one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.detach()
        loss = (functional.linear(given, self.weight).tanh() - given.flip(0)).square().mean()
        (gradient,) = torch.autograd.grad(loss, [self.weight], create_graph=True)
        return functional.linear(x, self.weight - 0.5 * gradient).tanh()


class Transforms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ensemble, self.differentiates, self.adapts, self.last = Ensemble(), Differentiates(), Adapts(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        y = vmap(lambda row: row * row.sum())(x)
        return self.last(self.adapts(self.differentiates(self.ensemble(x + 0.1 * y))))


class Forces(nn.Module):
    """The gradient of an energy that several ranks compute is part of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = dense(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        energy = self.two(self.one(x)).sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return forces + energy


class Reverses(torch.autograd.Function):
    """A reversible block, which keeps no activation: backward computes them again from the result."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, f: nn.Module, g: nn.Module, *weights: Any) -> Any:
        ctx.f, ctx.g, ctx.weights = f, g, weights
        with torch.no_grad():
            left = left + f(right)
            right = right + g(left)
        ctx.save_for_backward(left, right)
        return left, right

    @staticmethod
    def backward(ctx: Any, of_left: torch.Tensor, of_right: torch.Tensor) -> Any:  # type: ignore[override]
        left, right = (tensor.detach() for tensor in ctx.saved_tensors)
        f_weights, g_weights = list(ctx.f.parameters()), list(ctx.g.parameters())
        with torch.enable_grad():
            left.requires_grad_()
            first = ctx.g(left)
        more, *of_g = torch.autograd.grad(first, [left, *g_weights], of_right)
        of_left = of_left + more
        with torch.enable_grad():
            right = (right - first).detach().requires_grad_()
            second = ctx.f(right)
        more, *of_f = torch.autograd.grad(second, [right, *f_weights], of_left)
        return (of_left, of_right + more, None, None, *of_f, *of_g)


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = dense(), dense()

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = *self.f.parameters(), *self.g.parameters()
        left, right = Reverses.apply(left, right, self.f, self.g, *weights)  # type: ignore[no-untyped-call]
        return left, right


class ReversibleStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reversible() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        left, right = x, x.sin()
        for block in self.blocks:
            left, right = block(left, right)
        return left + right


ENTRIES: dict[str, Entry] = {
    "custom functions": module(
        "a custom function's node lives no longer than its tensor; some write to inputs, some have no gradient",
        Functions,
        spread("one", "two", "three", "four"),
    ),
    "custom functions at the cut": module(
        "a module's result, and its argument, is a custom function's and nothing else keeps it",
        CustomFunctions,
        spread("one", "two", "three"),
        depths=(2,),
    ),
    "checkpoint": module(
        "parts that other ranks have run again in backward, some of them nested in others",
        lambda: Recomputes(False),
        spread(*numbered("layers"), "scale", "late"),
    ),
    "checkpoint, reentrant": module(
        "the same by a custom function that runs backward inside backward",
        lambda: Recomputes(True),
        spread(*numbered("layers"), "scale", "late"),
    ),
    "hooks of every kind": module(
        "hooks change arguments, results and gradients of modules on one rank or over several, of tensors, of weights",
        Hooked,
        spread("one", "two", "inner.0", "inner.1", "last"),
    ),
    "torch.func": module(
        "vmap, functional_call, grad and jvp inside modules; a step of gradient descent in the forward",
        Transforms,
        spread("ensemble", "differentiates", "adapts", "last"),
    ),
    "gradient in the forward": module(
        "the gradient of what several ranks compute is asked for in the forward",
        Forces,
        spread("one", "two"),
        depths=(2,),
        refused="torch.autograd.grad",
    ),
    "reversible blocks": module(
        "a custom function runs modules in its backward",
        ReversibleStack,
        spread(*numbered("blocks")),
    ),
}
