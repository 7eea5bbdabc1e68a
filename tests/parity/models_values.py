"""What crosses between ranks: values of many types, keyword arguments, views and in-place writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import shardwright as smp
import torch
from torch import nn

from .models_control import WIDTH, dense, last, pins, simple
from .problem import BATCH, Models, Phase, Problem


@dataclass
class Statistics:
    """A type of the script's own."""

    mean: torch.Tensor
    count: int
    label: str


smp.register_type(Statistics)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.inner(x)
        return {
            "tuple": (y, None, [y * 2, (x,)]),
            "pair": Pair(y.sin(), None),
            "statistics": Statistics(mean=y.mean(0), count=len(y), label="mean"),
            "int": 3,
            "str": "text",
            "none": None,
            "bool": True,
            "float": 0.5,
            "slice": slice(0, 4),
            "dtype": x.dtype,
            "size": x.shape,
        }


class Types(nn.Module):
    """Takes apart what another rank returns, and hands such things on."""

    def __init__(self) -> None:
        super().__init__()
        self.many = Many()
        self.use = UseMany()
        self.nothing = ReturnsNone()

    def forward(self, x: torch.Tensor) -> Any:
        values = self.many(x)
        assert values["none"] is None
        assert (values["int"], values["str"], values["bool"]) == (3, "text", True)
        assert self.nothing(x, flag="on") is None
        return self.use(values, extra={"again": [values["pair"]]}), values["statistics"], values["int"]


class UseMany(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, values: dict[str, Any], extra: dict[str, Any]) -> torch.Tensor:
        y, _, (doubled, (x,)) = values["tuple"]
        (pair,) = extra["again"]
        scaled = doubled * values["float"] * values["int"] + values["statistics"].mean / values["statistics"].count
        cut = torch.zeros(values["size"], dtype=values["dtype"])
        cut[values["slice"]] = 1.0
        result: torch.Tensor = self.inner(y + scaled + pair.left * cut) + x
        return result


class ReturnsNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x: torch.Tensor, flag: str) -> None:
        assert flag == "on"
        self.inner(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(
        self, x: torch.Tensor, *, scale: float = 2.0, offset: torch.Tensor | None = None, negate: bool = False
    ) -> torch.Tensor:
        y: torch.Tensor = self.inner(x) * scale
        if offset is not None:
            y = y + offset
        return -y if negate else y


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Scaled(), Scaled()

    def forward(self, x: torch.Tensor, *, negate: bool = True) -> Any:
        first = self.one(x)
        second = self.two(x=first, offset=x + first, scale=0.5)
        return self.one(second, negate=negate) + second


class Undifferentiated(nn.Module):
    """Returns tensors that need no gradient beside one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.inner(x)
        return y, y.argmax(-1), y > 0, y.detach() * 2


class NoGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Undifferentiated(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        y, best, positive, fixed = self.one(x)
        with torch.no_grad():
            weight = self.two(fixed)
        chosen = y.gather(1, best[:, None])
        return self.two(y.where(positive, fixed)) * chosen * weight


class Doubles(nn.Module):
    """Writes to its input, and returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2).add_(1)
        y: torch.Tensor = self.inner(x)
        return y


class WritesInput(nn.Module):
    """The caller goes on with a tensor that a module elsewhere wrote to, and writes to results itself."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.doubles, self.after = dense(), Doubles(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.before(x).clone()
        y = self.doubles(x)
        z = self.after(x + y) * 1.5
        z.add_(x)
        z[:, 0] = y[:, 1]
        return z.relu_() + x


class Slices(nn.Module):
    """Returns views of its input, its input itself, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x + 0)
        return x[:, :3], x.t(), x, y, y, y.view(-1, 2, WIDTH // 2)


class Views(nn.Module):
    """Views that came back are views here too: a write to one is seen through the others."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.slices, self.after = dense(), Slices(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.before(x) * 1.5
        part, transposed, same, y, again, shaped = self.slices(x)
        assert same is x
        assert again is y
        x.mul_(1.25)
        y.add_(1)
        return self.after(x + y) * part.mean() + transposed.mean(0)[:, None] + shaped.mean((1, 2))[:, None]


class WholeStorage(nn.Module):
    """Arguments in unusual layouts: transposed, expanded, strided, without elements or axes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Layouts(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.two(x)
        return self.one(y.t(), y[:, :1].expand(-1, WIDTH), y[::2], y.new_empty(0, 3), y.mean(), (y, y))


class Layouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(
        self,
        transposed: torch.Tensor,
        expanded: torch.Tensor,
        strided: torch.Tensor,
        empty: torch.Tensor,
        scalar: torch.Tensor,
        twice: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        assert twice[0] is twice[1]
        result: torch.Tensor = self.inner(transposed.t() + expanded) * scalar + strided.mean() + empty.sum() + twice[1]
        return result


class Methods(nn.Module):
    """Reached by another method than ``forward``, and through an attribute of a remote module."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Scaled(), dense()

    def score(self, x: torch.Tensor) -> Any:
        return self.one.inner(self.two(x)).square().sum()

    def forward(self, x: torch.Tensor) -> Any:
        return self.two(self.one(x))


def types_step(models: Models, x: torch.Tensor) -> Any:
    output, statistics, three = models["model"](x)
    loss = output.square().mean() + statistics.mean.sum() * 0.1
    models["model"].backward(loss)
    return {"loss": loss, "statistics": statistics, "three": three, "nothing": None, "pair": Pair(output, None)}


def keyword_step(models: Models, x: torch.Tensor, *, table: torch.Tensor | None = None) -> Any:
    output = models["model"](x, negate=False)
    loss = output.square().mean()
    models["model"].backward(loss)
    return loss, output


def methods_step(models: Models, x: torch.Tensor) -> Any:
    loss = models["model"].score(x) / len(x)
    models["model"].backward(loss)
    return (loss,)


def whole_and_axes_step(models: Models, x: torch.Tensor, table: torch.Tensor, across: torch.Tensor) -> Any:
    output = models["model"](x + across.t()) * table
    loss = output.square().mean()
    models["model"].backward(loss)
    return loss, output


def whole_and_axes_batch(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(BATCH, WIDTH, generator=random),
        torch.randn(WIDTH, generator=random),
        torch.randn(WIDTH, BATCH, generator=random),
    )


PROBLEMS: dict[str, Problem] = {
    "values of many types": simple(Types, pins(many=1, use=last, nothing=1), phases=(Phase(body=types_step),)),
    "keyword-only arguments": simple(KeywordOnly, pins(one=1, two=last), phases=(Phase(body=keyword_step),)),
    "output without gradient": simple(NoGradient, pins(one=1, two=last)),
    "child writes its input": simple(WritesInput, pins(doubles=1, after=last)),
    "child returns views": simple(Views, pins(slices=1, after=last)),
    "unusual layouts": simple(WholeStorage, pins(one=1, two=last)),
    "methods of the model": simple(Methods, pins(one=1, two=last), phases=(Phase(body=methods_step),)),
    "inputs split differently": simple(
        Methods,
        pins(one=1, two=last),
        batch=whole_and_axes_batch,
        phases=(Phase(body=whole_and_axes_step, whole=("table",), axes={"across": 1}),),
    ),
}
