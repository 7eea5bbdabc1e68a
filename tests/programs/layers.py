"""Layers of random programs: modules of torch and such as people write, which run no operations of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import shardwright as smp
import torch
from torch import nn
from torch.nn.utils import parametrizations, rnn

from tests.programs.log import log_of_run
from tests.programs.tables import matrix
from tests.state.keepers import KEEPERS, Keeper

#: A module that keeps something, by its name.
STATEFUL: dict[str, Callable[[int], nn.Module]] = {keeper.__name__: keeper for keeper in KEEPERS}  # type: ignore[attr-defined]


class Leaf(nn.Module):
    """A layer that is given rows of its width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.make(width)

    def make(self, width: int) -> None:
        """Make its parts."""
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def arguments(self, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """What the caller gives it."""
        return (matrix(given[0], self.width),)


class _OfComplex(Leaf):
    """A layer that is given complex numbers."""

    def arguments(self, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        rows = matrix(given[0], self.width)
        return (torch.complex(rows, rows.roll(1, -1)),)


class Conjugated(_OfComplex):
    def forward(self, z: torch.Tensor) -> Any:
        return z.conj()


class Adjoint(_OfComplex):
    def forward(self, z: torch.Tensor) -> Any:
        return z.mH, (z * self.weight).conj()


class Imaginary(_OfComplex):
    def forward(self, z: torch.Tensor) -> Any:
        return {"negative": z.conj().imag, "turned": z * torch.polar(self.weight, self.weight)}


class ComplexPassed(_OfComplex):
    """Given a conjugate that it passes on."""

    def arguments(self, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        return (super().arguments(given)[0].conj(),)

    def forward(self, z: torch.Tensor) -> Any:
        return z, torch.view_as_real(z * self.weight)


class SparseResult(Leaf):
    def forward(self, x: torch.Tensor) -> Any:
        return (torch.relu(x) * self.weight).to_sparse()


class SparseArgument(Leaf):
    def arguments(self, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        rows = matrix(given[0], self.width)
        return rows, {"graph": (rows.detach() @ rows.detach().t() > 0).double().to_sparse()}

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> Any:
        return torch.sparse.mm(more["graph"], x * self.weight) / len(x)


class Scripted(Leaf):
    def make(self, width: int) -> None:
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(width, width), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Attention(Leaf):
    def make(self, width: int) -> None:
        self.inner = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x, x, x, attn_mask=torch.ones(len(x), len(x), dtype=torch.bool).triu(1))


class Encoder(Leaf):
    def make(self, width: int) -> None:
        self.inner = nn.TransformerEncoderLayer(width, 2, 8, dropout=0.0, batch_first=True)

    def arguments(self, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        return (matrix(given[0], self.width).unsqueeze(0),)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Packed(Leaf):
    """Given a packed sequence, and returns one."""

    def make(self, width: int) -> None:
        self.inner = nn.LSTM(width, 4, batch_first=True)

    def arguments(self, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        rows = matrix(given[0], self.width)
        lengths = torch.tensor([len(rows), 1])
        return (rnn.pack_padded_sequence(torch.stack([rows, rows * 0.5]), lengths, batch_first=True),)

    def forward(self, x: Any) -> Any:
        return self.inner(x)[0]


class Embedded(Leaf):
    """Given integers that are computed of data."""

    def make(self, width: int) -> None:
        self.inner = nn.Embedding(5, width)

    def arguments(self, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        return ((matrix(given[0], self.width).detach()[:, 0].sigmoid() * 4.99).long(),)

    def forward(self, index: torch.Tensor) -> Any:
        return self.inner(index)


class Convolution(Leaf):
    def make(self, width: int) -> None:
        self.inner = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x.unsqueeze(1)).mean(1)


class Parametrized(Leaf):
    def make(self, width: int) -> None:
        self.inner = parametrizations.weight_norm(nn.Linear(width, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Spectral(Leaf):
    """Its parametrization keeps vectors that each forward changes."""

    def make(self, width: int) -> None:
        self.inner = parametrizations.spectral_norm(nn.Linear(width, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Experts(Leaf):
    """Rows go to one of several layers."""

    def make(self, width: int) -> None:
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> Any:
        shares = self.router(x).softmax(-1)
        chosen, result = shares.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            result = result.index_add(0, rows, expert(x[rows]) * shares[rows, number, None])
        return result, chosen


class Forces(Leaf):
    """Computes with a gradient of its own."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            here = x.detach().requires_grad_()
            energy = ((here * self.weight).tanh() ** 2).sum()
            (force,) = torch.autograd.grad(energy, here, create_graph=True)
        return x + force.detach() + (self.weight * 0.5)


class Transformed(Leaf):
    """Computes with transforms of functions."""

    def forward(self, x: torch.Tensor) -> Any:
        rows = torch.vmap(torch.func.grad(lambda row: (row.sin() * self.weight).sum()))(x)
        return rows + torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))[1]


class InPlaceFirst(Leaf):
    """Begins with an activation in place."""

    def make(self, width: int) -> None:
        self.inner = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(width, width), nn.ReLU(inplace=True))

    def arguments(self, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        return (matrix(given[0], self.width) * 1,)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Shapes(Leaf):
    """Returns numbers, masks and integers beside a tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        best = (x * self.weight).max(-1)
        return x * self.weight, best, x > 0, x.shape, float(x.detach().mean()), best.indices


LEAVES: dict[str, type[Leaf]] = {
    kind.__name__: kind
    for kind in (
        *(Conjugated, Adjoint, Imaginary, ComplexPassed, SparseResult, SparseArgument, Scripted, Attention, Encoder),
        *(Packed, Embedded, Convolution, Parametrized, Spectral, Experts, Forces, Transformed, InPlaceFirst, Shapes),
    )
}


def make_layer(kind: str, width: int, activations: Sequence[int] = ()) -> nn.Module:
    """A layer by its name."""
    if kind in LEAVES:
        return LEAVES[kind](width)
    if kind in STATEFUL:
        return STATEFUL[kind](width)
    if kind == "normalisation":
        return nn.BatchNorm1d(width)
    if kind == "linear":
        return nn.Linear(width, width)
    if kind == "scripted":
        return torch.jit.script(nn.Sequential(nn.Linear(width, width), nn.Sigmoid()))
    if kind == "recurrent":
        return nn.GRU(width, width, batch_first=True)
    activation = nn.Tanh()
    layers: list[nn.Module] = []
    for active in activations:
        layers += [nn.Linear(width, width)] + [activation] * active
    return nn.Sequential(*layers)


def call_layer(module: nn.Module, given: Sequence[torch.Tensor]) -> Any:
    """Call a layer, or any other module, with tensors in the shapes that it takes."""
    log = log_of_run[0]
    if isinstance(module, Leaf):
        arguments = module.arguments(given)
        log.saw(f"a layer {type(module).__name__}")
        with log.running(module, [argument for argument in arguments if isinstance(argument, torch.Tensor)]):
            return module(*arguments)
    if isinstance(module, Keeper):
        log.saw("modules that keep something")
        rows = matrix(given[0], len(module.weight))
        with log.running(module, [rows]):
            log.changes(module)
            return module(rows)
    if isinstance(module, torch.jit.ScriptModule):
        log.saw("a layer scripted itself")
        rows = matrix(given[0], next(module.parameters()).shape[-1])
        with log.running(module, [rows]):
            return module(rows)
    width = _width(module)
    if width is None:
        return module(given[0])
    tensor = given[0]
    fits = tensor.dim() > 0 and tensor.shape[-1] == width
    tensor = tensor if fits else tensor.mean().expand(2, width)
    with log.running(module, [tensor]):
        if isinstance(module, nn.BatchNorm1d):
            log.changes(module)
            return module(
                tensor.reshape(-1, width) if tensor.numel() > width else tensor.reshape(1, width).expand(2, -1)
            )
        if isinstance(module, nn.GRU):
            return module(tensor.reshape(1, -1, width))
        return module(tensor)


def _width(module: nn.Module) -> int | None:
    """The width that a layer of torch takes; None for a block."""
    if isinstance(module, nn.Sequential):
        module = module[0]
    sizes = {nn.BatchNorm1d: "num_features", nn.GRU: "input_size", nn.Linear: "in_features"}
    sizes[smp.nn.DistributedLinear] = "in_features"  # in the place of one whose weights are divided
    return next((getattr(module, size) for kind, size in sizes.items() if isinstance(module, kind)), None)
