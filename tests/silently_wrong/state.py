"""State that modules share, or hand on past arguments and results."""

from __future__ import annotations

import copy
from typing import Any

import shardwright as smp
import torch
from shardwright.execution.state_order import StateOrder
from shardwright.job.runtime import current_runtime
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.silently_wrong.scenario import compare_gradients, scenario, square, train, train_both
from tests.silently_wrong.stages import WIDTH, Layer, Noting


class Keeping(nn.Module):
    """Reads what a child has left behind, after another module has run."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there, self.again = Noting(), Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.again(self.there(self.here(x)))
        return y + self.here.penalty


@scenario
def an_attribute_read_after_a_module_elsewhere_has_run() -> Any:
    return train(Keeping(), square)


class Cache:
    """An object that modules share."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}


class Caching(nn.Module):
    """Adds what the module before it has left in the cache."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.linear, self.cache = nn.Linear(WIDTH, WIDTH), cache

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        y = self.linear(x)
        if not first:
            y = y + self.cache.kept["last"]
        self.cache.kept["last"] = y
        return y


class CachingStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        cache = Cache()
        self.before = nn.Sequential(*(Layer() for _ in range(3)))
        self.one, self.two, self.three = (Caching(cache) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.three(self.two(self.one(x, True), False), False)


def _automatic(plain: nn.Module, *together: str) -> Any:
    """One step, automatically divided; these modules have to be on one rank, and the reason has to be known."""
    model = smp.DistributedModel(copy.deepcopy(plain))
    train_both(model, plain)
    decision = model.placement.ownership.decision
    assert len({decision.modules[path] for path in together}) == 1, decision.modules
    assert {path for join in decision.joins for path in join.modules} >= set(together), decision.joins
    return compare_gradients(model, plain)


@scenario
def a_cache_object_that_children_share() -> Any:
    return _automatic(CachingStages(), "one", "two", "three")


@scenario
def a_cache_object_that_children_on_two_ranks_share() -> Any:
    return train(CachingStages(), square, one=0, two=1)


LAST: torch.Tensor | None = None


class Global(nn.Module):
    """Adds what the module before it has left in a global variable."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        global LAST
        y = self.linear(x)
        if not first:
            assert LAST is not None
            y = y + LAST
        LAST = y
        return y


class GlobalStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(*(Layer() for _ in range(3)))
        self.one, self.two, self.three = Global(), Global(), Global()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.three(self.two(self.one(x, True), False), False)


@scenario
def a_global_variable_that_children_share() -> Any:
    return _automatic(GlobalStages(), "one", "two", "three")


@scenario
def a_global_variable_that_children_on_two_ranks_share() -> Any:
    return train(GlobalStages(), square, one=0, two=1)


class Telling(nn.Module):
    """Writes an attribute on its sibling."""

    def __init__(self, sibling: nn.Module) -> None:
        super().__init__()
        self.linear, self.sibling = nn.Linear(WIDTH, WIDTH), [sibling]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sibling[0].factor = x.detach().abs().mean()
        return self.linear(x)


class Told(nn.Module):
    factor: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor


class SiblingStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(*(Layer() for _ in range(3)))
        self.two = Told()
        self.one = Telling(self.two)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(self.before(x)))


@scenario
def an_attribute_written_on_a_sibling() -> Any:
    return _automatic(SiblingStages(), "one", "two")


class Recurrent(nn.Module):
    """Keeps its state from one call to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        self.state = self.linear(x) if first else (self.linear(x) + self.state).tanh()
        return self.state


class RecurrentStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.between, self.more = Recurrent(), Layer(), nn.Sequential(*(Layer() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self.cell(self.between(self.cell(self.more(x), True)), False))


@scenario
def state_that_a_module_keeps_from_call_to_call() -> Any:
    return train(RecurrentStages(), square, cell=1)


class Stash(nn.Module):
    """Gives what it was given by the call before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.kept = getattr(self, "kept", None), x
        return x if before is None else x + before

    def forget(self) -> None:
        self.kept = None


class StashStages(nn.Module):
    """Two modules call one stash."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(*(Layer() for _ in range(3)))
        stash = Stash()
        self.one, self.two = Stashing(stash), Stashing(stash)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        self.one.stash.forget()
        return self.two(self.one(x))


class Stashing(nn.Module):
    def __init__(self, stash: Stash) -> None:
        super().__init__()
        self.linear, self.stash = nn.Linear(WIDTH, WIDTH), stash

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stash(self.linear(x))


@scenario
def state_of_a_module_without_parameters_that_two_modules_call() -> Any:
    return _automatic(StashStages(), "one", "two")


class CountedLayer(Layer):
    """A layer that counts."""

    def __init__(self, *, computes: bool) -> None:
        super().__init__()
        self.computes, self.count = computes, 0

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self(x) * (1 + self.count * self.computes)


class Checkpointing(nn.Module):
    """A reentrant checkpoint around a method that counts, and a layer elsewhere."""

    def __init__(self, *, computes: bool) -> None:
        super().__init__()
        self.here, self.there = CountedLayer(computes=computes), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.there(checkpoint(self.here.counted, self.there(x), use_reentrant=True))


def train_checkpointing(*, computes: bool) -> Any:
    try:
        return train(Checkpointing(computes=computes), square)
    finally:  # other scenarios' microbatches need not run one after another
        current_runtime().add(StateOrder())


@scenario
def a_count_in_a_reentrant_checkpoint() -> Any:
    return train_checkpointing(computes=False)


@scenario
def a_count_that_a_reentrant_checkpoint_computes_with() -> Any:
    return train_checkpointing(computes=True)
