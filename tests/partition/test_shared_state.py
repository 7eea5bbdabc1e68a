"""What modules share past arguments and results is found, and a trace leaves nothing in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from shardwright.partition.decide import decide
from shardwright.partition.decision import Decision
from shardwright.values import decode, encode
from torch import nn

SETTINGS = SimpleNamespace(
    auto_partition=True, default_partition=0, memory_weight=0.8, skip_tracing=False, refine_partition=False
)
COUNTS: dict[str, int] = {}
UNTOUCHED: list[int] = [1]


class Memory:
    """An object that modules share."""

    def __init__(self) -> None:
        self.log: list[torch.Tensor] = []
        self.table = torch.zeros(3)
        self.inner = {"last": None}


class Layer(nn.Module):
    def __init__(self, memory: Any = None) -> None:
        super().__init__()
        self.linear, self.memory = nn.Linear(4, 4), memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Logging(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory.log.append(x)
        return self.linear(x)


class Filling(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory.table.add_(1)
        return self.linear(x)


class Nested(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory.inner["last"] = x
        return self.linear(x)


def count(name: str) -> None:
    COUNTS[name] = COUNTS.get(name, 0) + 1


class Counting(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count(type(self).__name__)
        return self.linear(x) * UNTOUCHED[0]


class OwnCounter(Layer):
    """Keeps to itself what it keeps."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.linear(x)


def decided(*layers: nn.Module) -> Decision:
    model = nn.Sequential(*layers)
    return decide(model, functools.partial(model, torch.ones(2, 4)), SETTINGS, 2)


def joined(decision: Decision) -> set[str]:
    return {path for join in decision.joins for path in join.modules}


def check_shared(kind: type[Layer]) -> Memory:
    memory = Memory()
    decision = decided(Layer(), Layer(), kind(memory), kind(memory), Layer())
    assert joined(decision) == {"2", "3"}
    assert decision.modules["2"] == decision.modules["3"]
    assert {*decision.modules.values()} == {0, 1}
    assert len(decision.one_at_a_time) == 1
    return memory


def test_a_list_in_an_object_that_layers_share() -> None:
    memory = check_shared(Logging)
    assert memory.log == []


def test_a_tensor_in_an_object_that_layers_share_is_written_to() -> None:
    memory = check_shared(Filling)
    assert memory.table.tolist() == [0, 0, 0]


def test_a_dict_in_an_object_that_layers_share() -> None:
    memory = check_shared(Nested)
    assert memory.inner == {"last": None}


def test_a_list_that_two_modules_hold() -> None:
    class Appending(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.memory.append(x)
            return self.linear(x)

    shared: list[torch.Tensor] = []
    decision = decided(Layer(), Layer(), Appending(shared), Appending(shared), Layer())
    assert joined(decision) == {"2", "3"}
    assert shared == []


def test_a_global_variable_that_a_function_changes() -> None:
    COUNTS.clear()
    decision = decided(Layer(), Layer(), Counting(), Counting(), Layer())
    assert joined(decision) == {"2", "3"}
    assert {"COUNTS" in join.reason for join in decision.joins} == {True}
    assert not any("UNTOUCHED" in join.reason for join in decision.joins)
    assert COUNTS == {}


def test_what_only_one_module_keeps_needs_nothing() -> None:
    memories = [Memory(), Memory()]
    decision = decided(Layer(), OwnCounter(), Logging(memories[0]), Logging(memories[1]), OwnCounter())
    assert joined(decision) == set()
    assert decision.one_at_a_time == ()


def test_objects_that_nobody_changes_need_nothing() -> None:
    memory = Memory()
    decision = decided(*(Layer(memory) for _ in range(4)))
    assert joined(decision) == set()
    assert decision.one_at_a_time == ()


class Settings:
    """An object that all modules read, and of which some change one attribute."""

    other_names: ClassVar[dict[str, str]] = {"alias": "kind"}

    def __init__(self) -> None:
        self.width, self.kind = 4, "unknown"

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(Settings.other_names.get(name, name))


class Deciding(Layer):
    """Reads one attribute, and sets another the first time."""

    def __init__(self, settings: Settings, how: Callable[[Settings], None] | None) -> None:
        super().__init__(settings)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) / self.memory.width
        if self.how is not None:
            self.how(self.memory)
        return x


def decide_kind(settings: Settings) -> None:
    if settings.kind == "unknown":
        settings.kind = "known"


def forget_kind(settings: Settings) -> None:
    if hasattr(settings, "kind"):
        del settings.kind


def read_kind_by_another_name(settings: Settings) -> None:
    assert settings.alias in ("unknown", "known")


def read_all(settings: Settings) -> None:
    assert "kind" in vars(settings)


def decide_without_a_sign(settings: Settings) -> None:
    object.__setattr__(settings, "kind", "known")


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ((None, None, decide_kind, None), set()),
        ((None, decide_kind, decide_kind, None), {"1", "2"}),
        ((None, forget_kind, lambda settings: hasattr(settings, "kind"), None), {"1", "2"}),
        ((None, decide_kind, read_kind_by_another_name, None), {"0", "1", "2", "3"}),
        ((None, decide_kind, read_all, None), {"0", "1", "2", "3"}),
        ((None, decide_without_a_sign, None, None), {"0", "1", "2", "3"}),
    ],
    ids=["one module", "two modules", "deleted", "by another name", "all at once", "unseen"],
)
def test_only_who_uses_what_changes_in_an_object_is_joined(
    ways: tuple[Callable[[Settings], None] | None, ...], expected: set[str]
) -> None:
    settings = Settings()
    watched = {name: vars(Settings)[name] for name in ("__init__", "__getattribute__")}
    decision = decided(*(Deciding(settings, how) for how in ways), Layer())
    assert joined(decision) == expected
    assert {*decision.modules.values()} == {0, 1}
    assert vars(settings) == {"width": 4, "kind": "unknown"}
    assert {name: vars(Settings)[name] for name in watched} == watched
    assert "__setattr__" not in vars(Settings)


def test_state_within_one_whole_module_does_not_keep_microbatches_apart() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            memory = Memory()
            self.first, self.second = Nested(memory), Nested(memory)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    decision = decided(Layer(), Block(), Layer(), Layer())
    assert joined(decision) == {"1.first", "1.second"}
    assert len({decision.modules[path] for path in ("1", "1.first", "1.second")}) == 1
    assert decision.one_at_a_time == ()


def test_a_decision_with_reasons_survives_its_way() -> None:
    memory = Memory()
    decision = decided(Layer(), Layer(), Logging(memory), Logging(memory), Layer())
    assert decode(*encode(decision)).one_at_a_time == decision.one_at_a_time != ()
