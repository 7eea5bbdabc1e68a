"""A traced model becomes a decision that keeps together what must be together, and no more."""

from __future__ import annotations

import functools
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from shardwright.errors import PartitionError
from shardwright.model.ownership import apply_ownership
from shardwright.model.sentinel import is_sentinel
from shardwright.partition.decide import decide, divide
from shardwright.partition.decision import Decision
from shardwright.partition.manual import partition, set_partition
from shardwright.partition.report import assignments, render
from shardwright.values import decode, encode
from torch import nn
from torch.nn.utils import parametrizations


def settings(**keys: Any) -> Any:
    defaults = {
        "auto_partition": True,
        "default_partition": 0,
        "memory_weight": 0.8,
        "skip_tracing": False,
        "refine_partition": False,
    }
    return SimpleNamespace(**{**defaults, **keys})


def decided(model: nn.Module, *args: Any, num_devices: int = 2, **keys: Any) -> Decision:
    return decide(model, functools.partial(model, *args), settings(**keys), num_devices)


def joined(decision: Decision) -> set[tuple[str, str]]:
    return {join.modules for join in decision.joins}


def stack(num_layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(num_layers)))


def test_equal_layers_are_divided_equally_and_bytes_equal_the_model() -> None:
    model = stack()
    decision = decided(model, torch.ones(2, 8))
    assert [decision.modules[str(i)] for i in range(4)] == [0, 0, 1, 1]
    assert decision.parameter_bytes(0) == decision.parameter_bytes(1) == 2 * (8 * 8 + 8) * 4
    assert decision.joins == ()
    assert decision.report["boundary_crossings_per_microbatch"] == 1
    assert decode(*encode(decision)) == decision


def test_the_same_model_is_divided_the_same_way_every_time() -> None:
    first, *others = [decided(stack(), torch.ones(2, 8)) for _ in range(3)]
    assert others == [first, first]


def test_order_of_execution_not_of_registration_decides() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    decision = decided(Reversed(), torch.ones(1, 8))
    assert [decision.modules[f"layers.{i}"] for i in range(4)] == [1, 1, 0, 0]
    untraced = decided(Reversed(), torch.ones(1, 8), skip_tracing=True)
    assert [untraced.modules[f"layers.{i}"] for i in range(4)] == [0, 0, 1, 1]


def test_without_a_trace_the_model_is_not_run() -> None:
    decision = decide(stack(), lambda: pytest.fail("was run"), settings(skip_tracing=True), 2)
    assert {decision.modules[str(i)] for i in range(4)} == {0, 1}


class Reads(nn.Module):
    """Each way of reading another module's weight, one at a time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.near = nn.Linear(4, 4)
        self.far = nn.Linear(4, 4)
        self.closure = lambda x: x @ self.far.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.near(x)
        if self.how == "attribute":
            return nn.functional.linear(x, self.far.weight)
        if self.how == "closure":
            return self.closure(x)
        if self.how == "parameters":
            return x + sum(p.sum() for p in self.far.parameters())
        if self.how == "in a list":
            return torch.cat([x, self.far.weight])
        if self.how == "handed on":
            return self.near(self.far.weight)
        if self.how == "dtype and shape":
            return self.far(x.to(self.far.weight.dtype)[:, : self.far.weight.shape[1]])
        return self.far(x)


@pytest.mark.parametrize("how", ["attribute", "closure", "parameters", "in a list", "handed on"])
def test_a_weight_that_another_module_computes_with_joins_the_two(how: str) -> None:
    model = Reads(how)
    decision = decided(model, torch.ones(1, 4))
    assert joined(decision) == {("", "far")}
    assert decision.modules["far"] == decision.modules[""] == 0
    assert "far." in decision.joins[0].reason


@pytest.mark.parametrize("how", ["call", "dtype and shape"])
def test_calling_a_module_or_looking_at_its_weight_joins_nothing(how: str) -> None:
    assert decided(Reads(how), torch.ones(1, 4)).joins == ()


def test_a_weight_that_its_module_returns_or_its_holder_hands_on_joins_nothing() -> None:
    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 4))

        def forward(self) -> torch.Tensor:
            return self.weight

    class Apply(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return self.body(x * scale)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = Prompt()
            self.apply_to = Apply()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.apply_to(self.prompt() + x, scale=self.scale)

    assert decided(Model(), torch.ones(2, 4)).joins == ()


class Attributes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = Noting()
        self.second = Noting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "set from outside":
            self.second.factor = 2.0
        if self.how == "deleted from outside":
            vars(self.second)["factor"] = 2.0  # which nobody is seen to do
            del self.second.factor
        x = self.second(self.first(x))
        if self.how == "read by the parent":
            x = x + self.first.seen
        if self.how == "collected in a list":
            x = x + sum(self.first.log)
        return x


class Noting(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: torch.Tensor | None = None
        self.log: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.mean()
        self.log.append(self.seen)
        return self.layer(x) * self.factor


@pytest.mark.parametrize(
    ("how", "pair"),
    [
        ("read by the parent", ("", "first")),
        ("collected in a list", ("", "first")),
        ("set from outside", ("second", "")),
        ("deleted from outside", ("second", "")),
        ("its own only", None),
    ],
)
def test_an_attribute_that_one_module_sets_and_another_reads_joins_them(how: str, pair: tuple[str, str] | None) -> None:
    decision = decided(Attributes(how), torch.ones(1, 4))
    assert {tuple(sorted(p)) for p in joined(decision)} == ({tuple(sorted(pair))} if pair else set())


def test_modules_whose_kind_tells_are_joined_without_a_trace() -> None:
    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
            self.attention = nn.MultiheadAttention(4, 2)
            self.weights = nn.ParameterList([torch.ones(4)])
            self.compiled = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.compiled.compile(backend="eager")

    for traced in (False, True):
        model = Kinds()
        decision = decide(model, lambda: None, settings(skip_tracing=not traced), 2)
        for inside in ("normed.parametrizations.weight", "normed.parametrizations.weight.0"):
            assert decision.modules[inside] == decision.modules["normed"]
        assert decision.modules["attention.out_proj"] == decision.modules["attention"]
        assert decision.modules["weights"] == decision.modules[""]
        assert {decision.modules[path] for path in ("compiled", "compiled.0", "compiled.1")} == {
            decision.modules["compiled"]
        }


def test_a_model_compiled_as_a_whole_is_refused() -> None:
    with pytest.raises(PartitionError, match="compile the modules that stay whole"):
        decided(torch.compile(stack(), backend="eager"), torch.ones(1, 8))


class Stateful(nn.Module):
    """Without parameters: a buffer that changes, or one that does not."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.changes = changes
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            self.scale.add_(1)
        return x * self.scale


class SharesStateful(nn.Module):
    def __init__(self, changes: bool) -> None:
        super().__init__()
        shared = Stateful(changes)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), shared) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_constant_buffer_is_where_its_module_is_called() -> None:
    decision = decided(SharesStateful(changes=False), torch.ones(1, 4))
    assert {decision.modules[f"layers.{i}"] for i in range(4)} == {0, 1}
    assert [row.ranks for row in decision.buffers if "layers.0.1.scale" in row.names] == [(0, 1)]
    assert decision.follows["layers.0.1"] == (0, 1)
    for rank in (0, 1):
        model = SharesStateful(changes=False)
        apply_ownership(model, decision, rank)
        assert not is_sentinel(model.layers[0][1].scale)


def test_modules_that_call_one_with_a_changing_buffer_stay_together() -> None:
    decision = decided(SharesStateful(changes=True), torch.ones(1, 4))
    assert {decision.modules[f"layers.{i}"] for i in range(4)} == {decision.modules["layers.0.1"]}
    assert [len(row.ranks) for row in decision.buffers if "layers.0.1.scale" in row.names] == [1]


def by_hand() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.default = nn.Linear(4, 4)
            with partition(1):
                self.one = nn.Linear(4, 4)
                with partition(0):
                    self.inner = nn.Linear(4, 4)
                self.again = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.inner(self.one(self.default(x))))

    return Model()


def test_modules_created_in_a_context_go_where_it_says_and_the_innermost_wins() -> None:
    decision = decided(by_hand(), torch.ones(1, 4), auto_partition=False)
    assert decision.modules == {"": 0, "default": 0, "one": 1, "inner": 0, "again": 1, "again.0": 1}
    other = decided(by_hand(), torch.ones(1, 4), auto_partition=False, default_partition=1)
    assert other.modules["default"] == other.modules[""] == 1


def test_contexts_are_ignored_by_auto_partition_but_set_partition_is_not() -> None:
    model = by_hand()
    set_partition(model.default, 1)
    decision = decided(model, torch.ones(1, 4))
    assert decision.modules["default"] == 1
    plain = decided(by_hand(), torch.ones(1, 4))
    assert plain.modules != decided(by_hand(), torch.ones(1, 4), auto_partition=False).modules


def test_set_partition_wins_over_a_context_and_holds_for_what_is_below() -> None:
    model = by_hand()
    set_partition(model.again, 0)
    decision = decided(model, torch.ones(1, 4), auto_partition=False)
    assert decision.modules["again"] == 0


def test_nothing_is_left_of_a_context() -> None:
    init = nn.Module.__init__
    with partition(0), pytest.raises(LookupError), partition(1):
        raise LookupError
    assert nn.Module.__init__ is init
    assert "_smp_created_in_partition" not in nn.Linear(1, 1).__dict__


@pytest.mark.parametrize("place", [-1, True, "1", None, 1.0])
def test_a_place_that_is_no_rank_is_refused(place: Any) -> None:
    with pytest.raises(PartitionError, match="allowed: the pp_ranks, from 0"):
        set_partition(nn.Linear(1, 1), place)
    with pytest.raises(PartitionError, match="allowed: the pp_ranks, from 0"), partition(place):
        pass


def test_a_place_beyond_the_degree_is_refused_when_the_model_is_divided() -> None:
    model = stack()
    set_partition(model[1], 5)
    with pytest.raises(PartitionError, match=r"module '1' was placed on partition 5.*allowed: 0 to 1"):
        divide(model, None, settings(skip_tracing=True), 2)


def test_placing_joined_modules_apart_is_refused() -> None:
    model = Reads("attribute")
    set_partition(model, 0)
    set_partition(model.far, 1)
    with pytest.raises(PartitionError, match="far"):
        decided(model, torch.ones(1, 4), auto_partition=False)


def test_the_table_shows_every_rank_with_its_bytes() -> None:
    decision = decided(Reads("attribute"), torch.ones(1, 4), num_devices=3)
    console = Console(width=160, record=True, file=io.StringIO())
    render(decision, console)
    text = console.export_text()
    assert "Partition assignments: Reads over 3 pipeline ranks" in text
    assert f"{decision.parameter_bytes(0):,}" in text
    assert "kept together: the model itself and far: the first computes with far.weight" in text
    assert "too few parts: pp_rank 1, 2" in text
    assert assignments(decision) == {0: [""], 1: [], 2: []}


def test_the_table_shows_runs_of_layers_as_one() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    console = Console(width=160, record=True, file=io.StringIO())
    render(decided(Deep(), torch.ones(1, 4)), console)
    assert "layers.4-7" in console.export_text()


def test_a_reason_to_keep_modules_together_is_told_once_not_for_every_layer() -> None:
    """As with adapters, of which every layer has several."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.outer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(x) @ self.inner.weight

    console = Console(width=200, record=True, file=io.StringIO())
    decision = decided(nn.Sequential(*(Layer() for _ in range(6)), Reads("attribute")), torch.ones(1, 4))
    assert len(decision.joins) == 7
    render(decision, console)
    told = [line.rstrip() for line in console.export_text().splitlines() if line.startswith("kept together")]
    assert told == [
        f"kept together: 0 and 0.inner: the first {decision.joins[0].reason}; so are 5 more pairs of Layer and Linear, "
        "for the same reason",
        f"kept together: 6 and 6.far: the first {decision.joins[6].reason}",
    ]
