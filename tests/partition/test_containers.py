"""Modules that are never executed: they count for what they hold once, and change no division."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.partition.decide import divide
from shardwright.partition.decision import Decision
from shardwright.partition.trace import trace_forward
from shardwright.partition.tree import has_forward
from torch import nn


def divided(model: nn.Module, *args: Any, measure_times: bool = False, num_devices: int = 2, **keys: Any) -> Decision:
    defaults = {"auto_partition": True, "default_partition": 0, "memory_weight": 0.8, "refine_partition": False}
    trace = trace_forward(model, model, args, measure_times=measure_times)
    return divide(model, trace, SimpleNamespace(**{**defaults, **keys}), num_devices)  # type: ignore[arg-type]


def costs(decision: Decision) -> list[float]:
    return [load["cost"] for load in decision.report["devices"]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class InTurn(nn.Module):
    """Calls blocks one after another, wherever they are kept."""

    def __init__(self, kept: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.kept = kept
        self.blocks = lambda: blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks():
            x = block(x)
        return x


class Holder(nn.Module):
    """Has a forward that nobody calls."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, block in enumerate(blocks):
            self.add_module(str(number), block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Deep(nn.Module):
    """Keeps modules, a few levels down, that another module calls."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"list": nn.ModuleList(blocks)})


KEEPING = {
    "list": nn.ModuleList,
    "dict": lambda blocks: nn.ModuleDict({str(number): block for number, block in enumerate(blocks)}),
    "never_called": Holder,
    "sequential_never_called": lambda blocks: nn.Sequential(*blocks),
    "deep": Deep,
}


@pytest.mark.parametrize("measure_times", [False, True])
@pytest.mark.parametrize("kept", KEEPING)
def test_equal_blocks_are_halved_wherever_they_are_kept(kept: str, measure_times: bool) -> None:
    blocks = [Block() for _ in range(8)]
    model = InTurn(KEEPING[kept](blocks), blocks)
    decision = divided(model, torch.ones(40, 32), measure_times=measure_times)
    # All that is not in a block is the model's own code: one of 25 modules, and some of the time.
    assert costs(decision) == pytest.approx([0.5, 0.5], abs=0.05 if measure_times else 0.01)
    paths = {id(module): path for path, module in model.named_modules()}
    assert [decision.modules[paths[id(block)]] for block in blocks] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_without_a_trace_what_has_no_forward_is_not_counted() -> None:
    blocks = [Block() for _ in range(4)]
    assert not has_forward(nn.ModuleList(blocks))
    assert not has_forward(Deep(blocks))
    assert has_forward(blocks[0])
    of_its_own = nn.Module()
    of_its_own.forward = lambda x: x
    assert has_forward(of_its_own)
    model = InTurn(Deep(blocks), blocks)
    cfg = SimpleNamespace(auto_partition=True, default_partition=0, memory_weight=0.0, refine_partition=False)
    decision = divide(model, None, cfg, 2)  # type: ignore[arg-type]
    assert costs(decision) == pytest.approx([7 / 13, 6 / 13])


@dataclass(frozen=True)
class Planned:
    """A module of a random tree: what it holds, in containers or not, and which modules of the tree it calls.

    Attributes:
        children: Numbers of the modules that it holds.
        runs: First and last place of children that are kept in a container of their own, and of which kind.
        calls: Numbers of the modules that it calls, which come later.
        width: The width of its own layer; 0 if it has none.
    """

    children: tuple[int, ...]
    runs: tuple[tuple[int, int, str], ...]
    calls: tuple[int, ...]
    width: int


class Random(nn.Module):
    def __init__(self, planned: Planned, everything: Sequence[nn.Module]) -> None:
        super().__init__()
        self.calls = planned.calls
        self.everything = lambda: everything
        if planned.width:
            self.weight = nn.Parameter(torch.ones(4, planned.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.calls:
            x = self.everything()[number](x)
        return x + self.weight.sum() if hasattr(self, "weight") else x.clone()


def built(plan: Sequence[Planned], *, in_containers: bool) -> tuple[nn.Module, list[nn.Module]]:
    """The root, and all modules of the plan by number."""
    everything: list[nn.Module] = []
    everything.extend(Random(planned, everything) for planned in plan)
    for planned, module in zip(plan, everything, strict=True):
        place = 0
        while place < len(planned.children):
            run = next((run for run in planned.runs if in_containers and run[0] == place), None)
            if run is None:
                module.add_module(f"child{place}", everything[planned.children[place]])
                place += 1
            else:
                kept = KEEPING[run[2]]([everything[child] for child in planned.children[place : run[1] + 1]])
                module.add_module(f"kept{place}", kept)
                place = run[1] + 1
    return everything[0], everything


@st.composite
def plans(draw: st.DrawFn) -> list[Planned]:
    """Trees of up to 12 modules; each calls some that come later, whether it holds them or not."""
    size = draw(st.integers(2, 12))
    children: list[list[int]] = [[] for _ in range(size)]
    for number in range(1, size):
        children[draw(st.integers(0, number - 1))].append(number)
    found = []
    for number in range(size):
        own = children[number]
        runs = []
        place = 0
        while place < len(own):
            last = draw(st.integers(place, len(own) - 1))
            if draw(st.booleans()):
                runs.append((place, last, draw(st.sampled_from(sorted(KEEPING)))))
            place = last + 1
        # Those who are called most often are called 2 to the power of 11 times.
        callable_ones = st.sampled_from(own + list(range(number + 1, size)) or [number])
        calls = draw(st.lists(callable_ones, max_size=2)) if number + 1 < size else []
        found.append(Planned(tuple(own), tuple(runs), tuple(calls), draw(st.sampled_from([0, 3, 40, 600]))))
    return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans(), st.integers(2, 4), st.sampled_from([0.0, 0.2, 0.8, 1.0]))
def test_no_container_changes_a_division_and_costs_make_up_one(
    plan: list[Planned], num_devices: int, alpha: float
) -> None:
    places, all_costs = [], []
    for in_containers in (False, True):
        model, everything = built(plan, in_containers=in_containers)
        decision = divided(model, torch.ones(2, 3), num_devices=num_devices, memory_weight=alpha)
        paths = {id(module): path for path, module in model.named_modules()}
        places.append([decision.modules[paths[id(module)]] for module in everything])
        all_costs.append(costs(decision))
    assert places[0] == places[1]
    assert all_costs[0] == all_costs[1]
    assert sum(all_costs[0]) == pytest.approx(1.0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(plans())
def test_what_each_module_spends_and_keeps_makes_up_the_whole(plan: list[Planned]) -> None:
    model, everything = built(plan, in_containers=True)
    trace = trace_forward(model, model, (torch.ones(2, 3),), measure_times=True)
    assert trace.measurement is not None
    seconds = [record.own_seconds for record in trace.modules.values()]
    assert sum(found for found in seconds if found is not None) == pytest.approx(trace.measurement.seconds())
    paths = {id(module): path for path, module in model.named_modules()}
    for module in everything:
        record = trace.modules[paths[id(module)]]
        # Each result is a tensor of its own.
        assert record.own_activation_bytes == record.num_calls * 2 * 3 * 4
    kept = sum(record.own_activation_bytes for record in trace.modules.values())
    assert kept == sum(record.num_calls for record in trace.modules.values()) * 2 * 3 * 4
