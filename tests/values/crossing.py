"""Values of every kind that crosses ranks: made of two tensors, and taken apart into them again."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


@dataclasses.dataclass
class Plain:
    """Its ``__init__`` may run once only."""

    one: torch.Tensor
    other: Any = None
    made: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        assert not hasattr(self, "made")
        self.made = 1

    @cached_property
    def kept(self) -> int:
        return 7


@dataclasses.dataclass(frozen=True)
class Frozen:
    one: torch.Tensor
    other: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    one: torch.Tensor
    other: Any = None
    unset: int = dataclasses.field(init=False, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    one: torch.Tensor
    other: Any = None


@dataclasses.dataclass
class Derived(Slotted):
    third: str = "third"


class Named(NamedTuple):
    one: torch.Tensor
    other: Any


class Shade(enum.Enum):
    LIGHT = "light"
    DARK = "dark"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


def _constants(one: torch.Tensor, other: torch.Tensor) -> Any:
    return {
        "tensors": [one, other],
        "constants": [range(2, 11, 3), Shade.DARK, Level.HIGH, Rights.READ | Rights.WRITE],
        "numpy": [numpy.float32(1.5), numpy.int64(-7), numpy.bool_(True), numpy.float64(2.5), numpy.str_("é")],
        Shade.LIGHT: numpy.datetime64("2020-02-29"),
    }


def _of_constants(value: Any) -> Any:
    wanted = _constants(*value["tensors"])
    for name in ("constants", "numpy"):
        assert value[name] == wanted[name]
        assert list(map(type, value[name])) == list(map(type, wanted[name]))
    assert value["constants"][1] is Shade.DARK
    assert value[Shade.LIGHT] == wanted[Shade.LIGHT]
    return value["tensors"]


def _array(one: torch.Tensor, other: torch.Tensor) -> Any:
    array = other.detach().numpy()
    return one, {"rows": array, "turned": numpy.asfortranarray(array), "text": numpy.array(["a", "bc"])}


def _of_array(value: Any) -> Any:
    one, arrays = value
    assert arrays["text"].tolist() == ["a", "bc"]
    assert arrays["turned"].flags.f_contiguous
    assert numpy.array_equal(arrays["turned"], arrays["rows"])
    return one, torch.from_numpy(arrays["rows"] + arrays["turned"])


def _packed(one: torch.Tensor, other: torch.Tensor) -> PackedSequence:
    rows = torch.stack([one, other], dim=1)
    return pack_padded_sequence(rows, torch.tensor([1, 2] * len(rows))[: len(rows)], True, enforce_sorted=False)


def _of_packed(value: PackedSequence) -> Any:
    assert type(value) is PackedSequence
    rows, _ = pad_packed_sequence(value, batch_first=True)
    return rows[:, 0], rows[:, 1]


def _inference(one: torch.Tensor, other: torch.Tensor) -> Any:
    with torch.inference_mode():
        return one, other.detach() * 3


def _sparse(one: torch.Tensor, other: torch.Tensor) -> Any:
    half = (other.detach() / 2).to_sparse()
    twice = torch.sparse_coo_tensor(half._indices().repeat(1, 2), half._values().repeat(2), half.shape)
    one = one.to_sparse()
    return {"one": one, "same": one, "twice": twice}


def _of_sparse(value: Any) -> Any:
    assert value["same"] is value["one"]
    assert value["one"].is_coalesced()
    assert not value["twice"].is_coalesced()
    assert value["twice"]._nnz() == 2 * value["one"]._nnz()
    return value["one"].to_dense() + value["same"].to_dense(), torch.sparse.mm(
        value["twice"], value["one"].to_dense().t()
    ).mean()


def _nested(one: torch.Tensor, other: torch.Tensor) -> Any:
    offsets = torch.tensor([0, 1, len(one)])
    made = torch.nested.nested_tensor_from_jagged(one, offsets)
    return made, {"same": made, "other": torch.nested.nested_tensor_from_jagged(other.detach(), offsets)}


def _of_nested(value: Any) -> Any:
    made, others = value
    assert others["same"] is made
    assert [len(part) for part in made.unbind()] == [1, len(made.values()) - 1]
    return (made + others["other"]).values(), others["other"].values()


#: By kind, what makes a value of two tensors, and what takes it apart.
KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "dataclass": (Plain, lambda value: (value.one, value.other * value.kept * value.made)),
    "frozen": (Frozen, lambda value: (value.one, value.other)),
    "slots": (Slotted, lambda value: (value.one, value.other)),
    "frozen slots": (FrozenSlotted, lambda value: (value.one, value.other)),
    "derived": (Derived, lambda value: (value.one, value.other * len(value.third))),
    "nested": (
        lambda one, other: Plain(one, [Frozen(other, {"deep": Slotted(one, Shade.DARK)})]),
        lambda value: (value.one * value.other[0].other["deep"].one, value.other[0].one),
    ),
    "named tuple": (Named, lambda value: (value.one, value.other)),
    "return type": (
        lambda one, other: torch.max(torch.stack([one, other]), 0),
        lambda value: (value.values, value.values * value.indices),
    ),
    "constants": (_constants, _of_constants),
    "array": (_array, _of_array),
    "packed sequence": (_packed, _of_packed),
    "sparse": (_sparse, _of_sparse),
    "nested tensor": (_nested, _of_nested),
    "inference": (_inference, lambda value: (value[0], value[1].clone())),
}


class Through(nn.Module):
    """Takes a value apart, computes with its tensors, and returns a value of that kind."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, value: Any) -> Any:
        make, parts = KINDS[self.kind]
        one, other = parts(value)
        return make(one * self.weight, other + one.detach())


class Crossing(nn.Module):
    """Values of some kinds that pass several modules each, some of them on other ranks."""

    def __init__(self, kinds: Sequence[str], width: int) -> None:
        super().__init__()
        self.kinds = kinds
        self.first = nn.Linear(width, width)
        self.here = nn.ModuleList([Through(kind, width) for kind in kinds])
        self.away = nn.ModuleList([Through(kind, width) for kind in kinds])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for kind, here, away in zip(self.kinds, self.here, self.away, strict=True):
            make, parts = KINDS[kind]
            one, other = parts(away(here(away(make(x, x * 2)))))
            x = one.tanh() + other.sin()
        return x
