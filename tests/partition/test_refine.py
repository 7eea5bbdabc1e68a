"""Measured times of a forward, and a partition that is refined by them."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from shardwright.partition import measure
from shardwright.partition.decide import decide, divide
from shardwright.partition.decision import Decision
from shardwright.partition.manual import set_partition
from shardwright.partition.measure import Executed, Measurement, evened, repeated
from shardwright.partition.record import Trace
from shardwright.partition.report import render
from shardwright.partition.trace import trace_forward
from shardwright.values import decode, encode
from torch import nn


def settings(**keys: Any) -> Any:
    defaults = {
        "auto_partition": True,
        "default_partition": 0,
        "memory_weight": 0.8,
        "skip_tracing": False,
        "refine_partition": True,
        "pipeline": "interleaved",
        "active_microbatches": 4,
        "microbatches": 8,
    }
    return SimpleNamespace(**{**defaults, **keys})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x + self.attention(x))


class Network(nn.Module):
    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def with_times(trace: Trace, seconds: Callable[[str], float]) -> Trace:
    """A measured trace in which every piece of a module takes so long."""
    measurement = trace.measurement
    assert measurement is not None
    paths = [executed.path for executed in measurement.executions]
    pieces = tuple((number, seconds(paths[number])) for number, _ in measurement.pieces)
    timed = Measurement(executions=measurement.executions, pieces=pieces)
    totals = timed.own_seconds()
    modules = {
        path: dataclasses.replace(record, own_seconds=totals.get(path, 0.0)) for path, record in trace.modules.items()
    }
    return dataclasses.replace(trace, modules=modules, measurement=timed)


def block_seconds(path: str) -> float:
    """A linear layer of a block takes 10 ms, the head 40, everything else nothing."""
    if path == "head":
        return 0.04
    return 0.01 if path.endswith(("attention", "mlp.0", "mlp.2")) else 0.0


def refined(model: nn.Module, seconds: Callable[[str], float] = block_seconds, **keys: Any) -> Decision:
    trace = trace_forward(model, model, (torch.ones(2, 8),), measure_times=True)
    return divide(model, with_times(trace, seconds), settings(**keys), 2)


def test_blocks_take_turns_and_the_heavy_head_is_made_up_for() -> None:
    decision = refined(Network())
    ranks = [decision.modules[f"blocks.{number}"] for number in range(8)]
    assert sum(one != two for one, two in itertools.pairwise(ranks)) >= 4
    refinement = decision.report["refinement"]
    assert refinement["seconds_after"] < 0.9 * refinement["seconds_before"]
    loads = [0.0, 0.0]
    for path, rank in decision.modules.items():
        loads[rank] += block_seconds(path)
    assert max(loads) <= 1.1 * sum(loads) / 2
    assert decision.modules[""] == 0
    assert decode(*encode(decision)) == decision


def test_equal_times_give_equal_decisions() -> None:
    first, *others = [refined(Network(), pipeline="zero_bubble") for _ in range(3)]
    assert others == [first, first]


def test_what_was_placed_by_hand_stays() -> None:
    model = Network()
    set_partition(model.blocks[2], 0)
    set_partition(model.blocks[3].mlp, 1)
    decision = refined(model)
    assert decision.report["refinement"]["moved_nodes"] > 0
    assert {rank for path, rank in decision.modules.items() if path.startswith("blocks.2")} == {0}
    assert {rank for path, rank in decision.modules.items() if path.startswith("blocks.3.mlp")} == {1}


def test_modules_that_share_a_weight_stay_together() -> None:
    model = Network()
    model.blocks[7].attention.weight = model.blocks[0].attention.weight
    decision = refined(model)
    assert decision.modules["blocks.0.attention"] == decision.modules["blocks.7.attention"]


def test_switched_off_or_with_everything_placed_by_hand_nothing_is_refined() -> None:
    off = refined(Network(), refine_partition=False)
    assert "refinement" not in off.report
    assert off.report["computation"] == "measured_time"
    by_hand = refined(Network(), auto_partition=False)
    assert "refinement" not in by_hand.report
    assert set(by_hand.modules.values()) == {0}


def test_state_that_would_make_microbatches_wait_is_not_divided() -> None:
    class Shares(nn.Module):
        """Two linear layers that hand something on in an object."""

        def __init__(self) -> None:
            super().__init__()
            self.shared = SimpleNamespace(last=None)
            self.writer, self.reader = Writes(self.shared), Reads(self.shared)
            self.between = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.reader(self.between(self.writer(x)))

    model = nn.Sequential(Shares(), *(Block() for _ in range(6)))
    trace = trace_forward(model, model, (torch.ones(2, 8),), measure_times=True)
    assert [flow.scope for flow in trace.flows] == ["0"]
    seconds = {"0.between": 0.05, "0.writer.layer": 0.01, "0.reader.layer": 0.01}
    timed = with_times(trace, lambda path: seconds.get(path, block_seconds(path)))
    # Some memory may be given for time: blocks then take turns, and only what shares the object stays together.
    whole = divide(model, timed, settings(memory_weight=0.5), 2)
    assert whole.report["refinement"]["moved_nodes"] > 0
    assert whole.one_at_a_time == ()
    assert len({rank for path, rank in whole.modules.items() if path.startswith("0.")}) == 1


class Writes(nn.Module):
    def __init__(self, shared: SimpleNamespace) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shared.last = self.layer(x)
        return self.shared.last


class Reads(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.shared.last


def test_the_table_says_what_was_gained() -> None:
    buffer = io.StringIO()
    render(refined(Network()), Console(file=buffer, width=160))
    assert "refined by measured times: " in buffer.getvalue()
    assert "computation by measured time" in buffer.getvalue()


def test_a_small_forward_is_not_measured_and_a_large_one_is() -> None:
    small = Network()
    decision = decide(small, functools.partial(small, torch.ones(2, 8)), settings(), 2)
    assert "refinement" not in decision.report
    assert decision.report["computation"] == "number_of_modules"

    large = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    x = torch.ones(512, 256)
    assert measure.MIN_OPERATIONS <= 4 * 2 * 512 * 256 * 256
    decision = decide(large, functools.partial(large, x), settings(), 2)
    assert decision.report["refinement"]["seconds_after"] <= decision.report["refinement"]["seconds_before"]
    decision = decide(large, functools.partial(large, x), settings(refine_partition=False), 2)
    assert "refinement" not in decision.report
    one = decide(large, functools.partial(large, x), settings(), 1)
    assert "refinement" not in one.report


def test_pieces_are_in_order_and_make_up_the_forward() -> None:
    model = Network(2)
    trace = trace_forward(model, model, (torch.ones(2, 8),), measure_times=True)
    assert model.calls == 0
    measurement = trace.measurement
    assert measurement is not None
    executions = measurement.executions
    assert executions[0] == Executed(path="", caller=None, argument_bytes=0, result_bytes=0)
    assert executions[1] == Executed(path="", caller=0, argument_bytes=2 * 8 * 4, result_bytes=2 * 3 * 4)
    paths = [executions[number].path for number, _ in measurement.pieces]
    block = [*("blocks.0", "blocks.0.attention"), "blocks.0", "blocks.0.mlp", "blocks.0.mlp.0", "blocks.0.mlp"]
    assert paths[:8] == ["", "", *block]
    assert all(seconds >= 0 for _, seconds in measurement.pieces)
    total = sum(seconds for _, seconds in measurement.pieces)
    assert sum(measurement.own_seconds().values()) == pytest.approx(total)
    assert trace.modules["blocks.0"].own_seconds == pytest.approx(trace.modules["blocks.1"].own_seconds)


def test_a_module_that_raises_what_its_caller_catches_ends_its_pieces() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner(x)
            raise LookupError

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Sequential(Raises())
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.outer(x)  # type: ignore[no-any-return]
            except LookupError:
                return self.head(x)  # type: ignore[no-any-return]

    decision = refined(Catches())
    assert decision.report["refinement"]["moved_nodes"] >= 0


def test_a_forward_that_only_runs_once_goes_without_times(caplog: pytest.LogCaptureFixture) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
            self.inputs = (batch for batch in [torch.ones(512, 256)])

        def forward(self) -> torch.Tensor:
            return self.layers(next(self.inputs))  # type: ignore[no-any-return]

    model = Once()
    decision = decide(model, model, settings(), 2)
    assert "refinement" not in decision.report
    assert "StopIteration" in caplog.text
    with pytest.raises(StopIteration):
        decide(Once(), Once(), settings(), 2, {"trace_execution_times": True})


def run_of(*seconds: float, path: str = "a") -> Measurement:
    executions = tuple(
        Executed(path=name, caller=caller, argument_bytes=4, result_bytes=4)
        for name, caller in (("", None), (path, 0), (path, 0))
    )
    return Measurement(executions=executions, pieces=tuple(zip((0, 1, 0, 2, 0), seconds, strict=True)))


def test_each_piece_gets_its_shortest_time_in_runs_that_ran_the_same() -> None:
    runs = iter([run_of(0, 9, 0, 2, 0, path="b"), run_of(0, 0.1, 0, 0.3, 0), run_of(0, 0.2, 0, 0.4, 0)])
    assert repeated(lambda: next(runs)).pieces == ((0, 0), (1, 9), (0, 0), (2, 2), (0, 0))  # it took long enough
    runs = iter([run_of(0, 0.1, 0, 0.3, 0, path="b"), run_of(0, 0.1, 0, 0.3, 0), run_of(0, 0.2, 0, 0.4, 0)])
    seconds = [seconds for _, seconds in repeated(lambda: next(runs)).pieces]
    assert seconds == [0, 0.1, 0, 0.3, 0]


def test_pieces_that_do_the_same_take_equally_long() -> None:
    assert evened(run_of(1, 2, 3, 4, 5), {"": 0, "a": 1}).pieces == ((0, 1), (1, 3.0), (0, 3), (2, 3.0), (0, 5))
