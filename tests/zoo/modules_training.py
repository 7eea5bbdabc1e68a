"""What people do to their models and to their batches: adapters, compilation, mixed precision, codebooks, odd sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from tests.parity.models_control import WIDTH, dense
from tests.parity.problem import BATCH, Models, Phase, normal, square_loss

from .entry import Entry
from .entry_builders import module, numbered, spread


class LowRank(nn.Module):
    """A frozen layer with a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.up = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        self.scaling = {"default": 0.5}

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = self.base(x, *args, **kwargs)
        for name, down in self.down.items():
            result = result + self.up[name](down(x)) * self.scaling[name]
        return result

    def __getattr__(self, name: str) -> Any:
        """Attributes of the layer that is wrapped."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(self.base, name)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.narrow(functional.gelu(self.wide(self.norm(x)).to(self.wide.weight.dtype)))
        return x + y


def adapted() -> nn.Module:
    """Layers are replaced, in place, by such that wrap them; everything else is frozen."""
    model = nn.Sequential(*(Block() for _ in range(4))).requires_grad_(False)
    for block in model:
        block.wide = LowRank(block.wide)
        block.narrow = LowRank(block.narrow)
    return nn.Sequential(model, nn.Linear(WIDTH, WIDTH))


def trained_part(model: nn.Module) -> Optimizer:
    return SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05)


def compiled() -> nn.Module:
    """Some layers are compiled in place, some wrapped, some not compiled."""
    layers = [dense() for _ in range(4)]
    layers[0].compile(backend="eager")
    layers[3].compile(backend="eager")
    wrapped: Any = torch.compile(layers[1], backend="eager")
    return nn.Sequential(layers[0], wrapped, layers[2], layers[3])


def compiled_backward() -> nn.Module:
    """Has a layer that is compiled with its backward."""
    layers = [dense() for _ in range(4)]
    layers[3].compile(backend="aot_eager")
    return nn.Sequential(*layers)


class Codebook(nn.Module):
    """Replaces rows by the nearest of a codebook, which follows the rows; gradients pass straight through."""

    codes: torch.Tensor
    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before = dense()
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.before(x)
        chosen = torch.cdist(x.detach(), self.codes).argmin(1)
        nearest = self.codes[chosen].clone()
        if self.training:
            with torch.no_grad():
                hits = functional.one_hot(chosen, 5).to(x.dtype)
                self.counts.mul_(0.9).add_(hits.sum(0), alpha=0.1)
                self.codes += 0.1 * (hits.t() @ x - hits.sum(0)[:, None] * self.codes) / self.counts[:, None]
        return x + (nearest - x).detach(), chosen, (x - nearest).square().mean()


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.books = nn.ModuleList(Codebook() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        losses = []
        for book in self.books:
            x, _, loss = book(x)
            losses.append(loss)
        return x + sum(losses)


class Skips(nn.Module):
    """A way down and a way up, where each level of the way up also gets the result of its level of the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(2**i, 2 ** (i + 1), 3, stride=2, padding=1) for i in range(3))
        self.up = nn.ModuleList(
            nn.ConvTranspose1d(2 ** (i + 2), 2**i, 3, stride=2, padding=1, output_padding=1) for i in reversed(range(3))
        )

    def forward(self, x: torch.Tensor) -> Any:
        x, results = x[:, None], []
        for down in self.down:
            x = down(x).tanh()
            results.append(x)
        for up in self.up:
            x = up(torch.cat((x, results.pop()), dim=1)).tanh()
        return x[:, 0]


class Mixed(nn.Module):
    """Regions of mixed precision around modules of other ranks, and one inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(dense() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers[0](x)
            y = self.layers[1](x)
            with torch.autocast("cpu", enabled=False):
                z = self.layers[2](y.to(torch.float64))
        with torch.no_grad():
            weight = self.layers[3](z)
        return self.layers[3](z) * weight + x


class Follows(nn.Module):
    """A copy of a part follows the trained part slowly, and gives targets without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(*(dense() for _ in range(4)))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            target = self.target(x.flip(1))
        return self.online(x) - target


def sizes(*rows: int) -> Callable[[int, torch.Generator], tuple[torch.Tensor, ...]]:
    """Batches of so many rows, step after step."""
    return lambda step, random: (torch.randn(rows[step % len(rows)], WIDTH, generator=random),)


def sum_step(models: Models, x: torch.Tensor) -> Any:
    """The loss is a sum over rows, as for batches of several sizes; a batch's shape and other things are returned."""
    output = models["model"](x)
    loss = output.square().sum() / BATCH
    models["model"].backward(loss)
    return {"loss": loss, "rows": len(output)}


def stack() -> nn.Module:
    return nn.Sequential(*(dense() for _ in range(4)))


ENTRIES: dict[str, Entry] = {
    "low-rank adapters": module(
        "layers were replaced by wrappers that answer for them; most parameters are frozen, and not in the optimizer",
        adapted,
        None,
        optimizer=trained_part,
    ),
    "compiled children": module(
        "children are compiled, in place and wrapped, and must not be cut inside nor traced compiled",
        compiled,
        None,
    ),
    "compiled child with its backward": module(
        "a compiled child has a backward of its own, which is one node of the graph",
        compiled_backward,
        None,
        depths=(2,),
    ),
    "codebook": module(
        "buffers follow what passes through them, and gradients pass by what computes the result",
        Quantized,
        spread(*numbered("books")),
    ),
    "skips between levels": module(
        "results of every rank are used again much later, last first, on another rank",
        Skips,
        spread("down.0", "up.0", "down.1", "up.2", "down.2", "up.1"),
        batch=normal(8),
    ),
    "mixed precision in the forward": module(
        "the modes of a region go along with calls that leave its rank",
        Mixed,
        spread(*numbered("layers")),
    ),
    "teacher inside the model": module(
        "half of the model is a frozen copy that runs without gradients",
        Follows,
        None,
    ),
    "small last batch": module(
        "batches change in size from step to step, to another number of rows that divides evenly",
        stack,
        None,
        batch=sizes(8, 16, 4),
        phases=(Phase(body=sum_step),),
    ),
    "odd last batch": module(
        "the last batch cannot be divided into microbatches of equal size, of which the mean would be another",
        stack,
        None,
        batch=sizes(8, 8, 7),
        phases=(Phase(body=square_loss),),
        refused="drop the last batch (drop_last=True)",
    ),
}
