"""Random partitions: where each module goes, drawn by a seed, for any model."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import shardwright as smp
from shardwright.partition.decide import decide
from shardwright.partition.decision import Decision
from shardwright.partition.tree import ModelTree, tensor_bytes
from torch import nn

from .problem import Problem, generator
from .reference import Reference, Whole

#: How likely a module is where its parent is: without that, every call would cross.
TOGETHER = 0.6
#: A draw that leaves a rank empty, or gives one more than this, is drawn again, so many times at most.
MAX_SHARE = 0.75
DRAWS = 200


class _Watched(Whole):
    """A whole model whose first call is traced, for what must be on one rank."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.decision: Decision | None = None

    def _watch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.decision is None:
            self.decision = decide(self.module, functools.partial(function, *args, **kwargs), smp.state.cfg, 1)
        return function(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not callable(value) or hasattr(nn.Module, name) or not hasattr(type(self.module), name):
            return value
        return functools.partial(self._watch, value)


def random_places(name: str, problem: Problem, pp: int, seed: int) -> dict[str, int]:
    """Draw a pp_rank for every module with parameters, alike for those that must share one.

    Args:
        name: The problem's name; every problem gets other draws from one seed.
        problem: The problem.
        pp: The pipeline degree.
        seed: The seed.

    Returns:
        Places as in `Problem.pins`.
    """
    reference = Reference(problem, 1, 1, True, True)
    watched = {model: _Watched(module) for model, module in reference.modules.items()}
    reference.models = dict(watched)
    for index, phase in enumerate(problem.phases):
        for module in reference.modules.values():
            module.train(phase.training)
        reference.run(phase, [problem.batch(0, generator(name, 0, index, 0))])
    groups = {model: _Groups(whole.module, whole.decision) for model, whole in watched.items()}
    source = random.Random(f"{name} {pp} {seed}")
    places: dict[str, int] = {}
    for model, group in groups.items():
        drawn = group.draw(source, pp)
        places |= {f"{model}.{path}": rank for path, rank in drawn.items()}
    return places


class _Groups:
    """The modules of one model that must be placed together."""

    def __init__(self, module: nn.Module, decision: Decision | None) -> None:
        tree = ModelTree.of(module)
        self.first = {entry.path: entry.path for entry in tree.modules}
        for parameter in tree.parameters:
            for holder in parameter.holders:
                self._unite(parameter.holders[0], holder)
        for join in decision.joins if decision is not None else ():
            self._unite(*join.modules)
        self.placed = [entry for entry in tree.modules if next(entry.module.parameters(), None) is not None]
        self.sizes: dict[str, int] = {}
        for parameter in tree.parameters:
            group = self._group(parameter.holders[0])
            self.sizes[group] = self.sizes.get(group, 0) + tensor_bytes(parameter.tensor)

    def _group(self, path: str) -> str:
        while self.first[path] != path:
            path = self.first[path]
        return path

    def _unite(self, one: str, other: str) -> None:
        self.first[self._group(other)] = self._group(one)

    def draw(self, source: random.Random, pp: int) -> dict[str, int]:
        """The first draw that divides the model well, or the best of many."""
        best: dict[str, int] = {}
        least = float("inf")
        for _ in range(DRAWS):
            ranks = self._draw(source, pp)
            sizes = [0] * pp
            for group, rank in ranks.items():
                sizes[rank] += self.sizes.get(group, 0)
            share = max(sizes) / max(1, sum(sizes)) + sizes.count(0)
            if share < least:
                best, least = ranks, share
            if least <= MAX_SHARE:
                break
        return best

    def _draw(self, source: random.Random, pp: int) -> dict[str, int]:
        ranks: dict[str, int] = {}
        for entry in self.placed:
            group = self._group(entry.path)
            if group in ranks:
                continue
            parent = self._group(entry.parents[0]) if entry.parents else group
            together = parent in ranks and source.random() < TOGETHER
            ranks[group] = ranks[parent] if together else source.randrange(pp)
        return ranks
