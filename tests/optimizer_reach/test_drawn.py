"""Drawn optimizers over drawn divisions: what looks no farther than it may is exact in parts, and none is wrong."""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from shardwright.optimizer.reach.divided import Divided
from shardwright.optimizer.reach.known import Reach
from shardwright.optimizer.reach.probe import Found, probe
from shardwright.optimizer.reach.whole import _WholeStep
from shardwright.tensor_parallel.sharding import Origin, Rows, Sharding
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from tests.jobs.patience import HANG_SECONDS

DRAWS = 60
STEPS = 3
#: What no trial on small tensors sees, and how many steps show it: a rule that begins after the trial's last step, or
#: with the size of a tensor, with a number in the options, or with an attribute of the parameter.
HIDDEN = {"late": 8, "large": 3, "switched": 3, "attribute": 3}
SHAPES = ((8, 6), (6, 8), (12,), (8, 4))
Term = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]


def _momentum(update: torch.Tensor, one: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(one)) + update
    return state["momentum"]


def _rows(update: torch.Tensor, one: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    rows = update.reshape(len(one), -1).square().mean(1)
    state["rows"] = 0.5 * state.get("rows", torch.zeros_like(rows)) + rows
    return update / (state["rows"].sqrt() + 1e-6).view(-1, *[1] * (one.dim() - 1))


def _orthogonal(update: torch.Tensor, one: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    if one.dim() != 2:
        return update
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    return left @ right


#: What an update goes through, and how far each looks.
TERMS: dict[str, tuple[Reach, Term]] = {
    "momentum": (Reach.ELEMENT, _momentum),
    "sign": (Reach.ELEMENT, lambda update, one, state: torch.tanh(5 * update)),
    "decay": (Reach.ELEMENT, lambda update, one, state: update + 0.1 * one),
    "clamp": (Reach.ELEMENT, lambda update, one, state: update.clamp(-0.5, 0.5)),
    "norm": (Reach.PARAMETER, lambda update, one, state: update / (update.norm() + 1e-6)),
    "trust": (Reach.PARAMETER, lambda update, one, state: update * one.norm() / (update.norm() + 1e-6)),
    "rms clip": (Reach.PARAMETER, lambda update, one, state: update / update.square().mean().sqrt().clamp(min=0.7)),
    "centre": (Reach.PARAMETER, lambda update, one, state: update - update.mean()),
    "largest": (Reach.PARAMETER, lambda update, one, state: update / (update.abs().max() + 1e-6)),
    "shape": (Reach.PARAMETER, lambda update, one, state: update / one.shape[0] ** 0.5),
    "rows": (Reach.PARAMETER, _rows),
    "orthogonal": (Reach.PARAMETER, _orthogonal),
}


class Drawn(Optimizer):
    """An update that goes through terms, perhaps behind a norm over all gradients, and perhaps not always."""

    def __init__(self, params: Iterable[Any], terms: tuple[str, ...], over_all: bool, when: str | None = None) -> None:
        super().__init__(params, {"lr": 0.05, "strength": 0.5})
        self.terms, self.over_all, self.when = terms, over_all, when

    def _is_on(self, one: torch.Tensor) -> bool:
        state = self.state[one]
        state["steps"] = state.get("steps", 0) + 1
        return {
            None: True,
            "late": state["steps"] > 5,
            "large": 20 < one.numel() < 1000,
            "switched": self.param_groups[0]["strength"] > 1,
            "attribute": getattr(one, "matters", False),
        }[self.when]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        every = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        factor = 1.0
        if self.over_all:
            factor = 1 / (torch.stack([one.grad.norm() for one in every]).norm() + 1e-6)
        for one in every:
            update = factor * one.grad
            for term in self.terms if self._is_on(one) else ():
                update = TERMS[term][1](update, one, self.state[one])
            one.sub_(update, alpha=0.05)


def trained(make: Callable[[list[nn.Parameter]], Any], values: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Train with given gradients; return the parameters."""
    parameters = [nn.Parameter(each[0].clone()) for each in values]
    for one in parameters:
        one.matters = True  # type: ignore[attr-defined]
    step = make(parameters)
    for number in range(len(values[0]) - 1):
        for one, each in zip(parameters, values, strict=True):
            one.grad = each[1 + number].clone()
        step()
    return [one.detach() for one in parameters]


def sharding_of(numbers: random.Random, shape: tuple[int, ...]) -> Divided:
    """How a parameter is divided over two ranks: slices of a dim, of blocks, unevenly, or made of two weights."""
    dim = numbers.randrange(len(shape))
    how = numbers.choice(["plain", "blocks", "padded", "made of two", "rows"])
    if how == "rows":
        return Divided(Rows(dim=0, size=shape[0]), ())
    if how == "padded":
        return Divided(Sharding(dim=dim, size=shape[dim]), ())
    half = shape[0] // 2
    if how == "plain" or half % 2:
        return Divided(Sharding(dim=dim), ())
    two = (half, half)
    if how == "blocks":
        return Divided(Sharding(dim=0, blocks=two), ())
    origins = [Origin(name, (half, *shape[1:]), ((first, 0, half),)) for name, first in (("q", 0), ("k", half))]
    return Divided(Sharding(dim=0, blocks=two), tuple(origins))


def over_two_ranks(make: Callable[[Any], Optimizer], values: list[list[torch.Tensor]], divided: list[Divided]) -> Any:
    """Train on two threads, each of which has parts; return the whole parameters."""
    meeting = threading.Barrier(2, timeout=HANG_SECONDS)
    said: list[Any] = [None, None]

    def rank(place: int) -> list[torch.Tensor]:
        def gather(value: Any) -> Any:
            said[place] = copy.deepcopy(value)  # as a message is
            meeting.wait()
            every = list(said)
            meeting.wait()
            return every

        def stepping(parameters: list[nn.Parameter]) -> Any:
            optimizer, stand_ins = make(parameters), WeakIdKeyDictionary()
            known = {id(one): how for one, how in zip(parameters, divided, strict=True)}
            return lambda: _WholeStep(optimizer, known, (place, 2), gather, stand_ins).run(optimizer.step)

        parts = [
            [how.sharding.shard(each, place, 2) for each in every] for every, how in zip(values, divided, strict=True)
        ]
        return trained(stepping, parts)

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(rank, range(2))
    return [how.sharding.whole(pair) for how, pair in zip(divided, zip(first, second, strict=True), strict=True)]


def draw(seed: int) -> tuple[Counter[str], str]:
    """Check one optimizer in all ways; return which were exact and which refused, and what it was."""
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    terms = tuple(numbers.choices(list(TERMS), k=numbers.randint(1, 3)))
    over_all = numbers.random() < 0.2
    when = numbers.choice([None, None, None, *HIDDEN])
    said = f"seed {seed}: {terms}, over all: {over_all}, when: {when}"
    most = Reach.MODEL if over_all else max(TERMS[term][0] for term in terms)

    def make(parameters: Any) -> Drawn:
        return Drawn(parameters, terms, over_all, when)

    def whole_steps(parameters: Any) -> Drawn:
        made = make(parameters)
        made.param_groups[0]["strength"] = 2.0  # after the trial
        return made

    values = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(1 + HIDDEN.get(when or "", STEPS))]
        for shape in SHAPES
    ]
    optimizer = make([nn.Parameter(each[0]) for each in values])
    found: Found = probe(optimizer, Drawn, vars(optimizer))
    assert found.reach is not None, said
    assert not found.is_random, said
    assert found.reach <= most, said  # less where a later term undoes what an earlier one has seen
    plain = trained(lambda parameters: whole_steps(parameters).step, values)
    counts: Counter[str] = Counter()

    def check(whats: str, results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        for one, other in zip(results, expected, strict=True):
            assert float((one - other).abs().max()) < 1e-9, f"{said}: {whats}"
        counts["exact"] += 1

    divided = [sharding_of(numbers, shape) for shape in SHAPES]
    made_of = any(each.origins for each in divided)
    counts[f"hidden, {found.reach.name}"] += when is not None
    if when is not None:
        pass  # what a trial has not seen stays whole, and one that updates other parameters alone is not told apart
    elif found.reach is Reach.ELEMENT:
        halves = [[[each.reshape(-1).chunk(2)[rank] for each in every] for every in values] for rank in (0, 1)]
        parts = [trained(lambda parameters: whole_steps(parameters).step, half) for half in halves]
        joined = [torch.cat(pair).view_as(one) for pair, one in zip(zip(*parts, strict=True), plain, strict=True)]
        check("flat parts", joined, plain)
    else:
        counts["refused"] += 1
    if when is None and found.reach < Reach.MODEL:
        some = [trained(lambda parameters: whole_steps(parameters).step, values[first::2]) for first in (0, 1)]
        check("a share of the parameters", [some[0][0], some[1][0], some[0][1], some[1][1]], plain)
    elif when is None:
        counts["refused"] += 1
    expected = plain
    if made_of:  # in one process these are weights of their own
        singly = [
            part
            for every, how in zip(values, divided, strict=True)
            for part in ([[origin.of(each) for each in every] for origin in how.origins] if how.origins else [every])
        ]
        left = iter(trained(lambda parameters: whole_steps(parameters).step, singly))
        expected = [torch.cat([next(left) for _ in how.origins]) if how.origins else next(left) for how in divided]
    check(f"whole tensors over {divided}", over_two_ranks(whole_steps, values, divided), expected)
    return counts, said


def test_drawn_optimizers_are_exact_or_refused() -> None:
    counts: Counter[str] = Counter()
    for seed in range(DRAWS):
        counts += draw(seed)[0]
    assert counts["exact"] > DRAWS
    assert counts["refused"] > DRAWS // 4
    assert counts["hidden, ELEMENT"] > DRAWS // 6, "of these a trial sees nothing, and they are exact on whole tensors"
