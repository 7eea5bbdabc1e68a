"""Activation offloading: to host memory and to disk, for every horizon, strategy, schedule and mode."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from ..cases import DividedCase, MemoryCase, PipelineCase
from . import activation_checkpointing

NAME = "activation_offloading"
STORAGES = ("host", "disk")
#: Beyond what any case has: nothing goes out.
FAR = 100
HORIZONS = (1, 4, FAR)
STRATEGIES = ("each", "contiguous", "group_2", "whole", "layers", "calls")
SCHEDULES = activation_checkpointing.SCHEDULES


def _cases() -> Iterator[MemoryCase]:
    for number, (storage, horizon, strategy) in enumerate(itertools.product(STORAGES, HORIZONS, STRATEGIES)):
        pp, dp = ((1, 1), (2, 1), (3, 1), (2, 2), (1, 2))[number % 5]
        keys = activation_checkpointing.STATIC if number % 3 == 2 and pp > 1 else ()
        yield _case("large layers", storage, horizon, strategy, pp, dp, SCHEDULES[number % 4], keys=keys)
    # Tensors below the least size, which stay; and models with shared masks, structures, state and several calls.
    for number, problem in enumerate(
        ("layers", "attention", "structures", "shared", "layers with state", "GPT-2", "T5")
    ):
        storage, horizon = STORAGES[number % 2], HORIZONS[number % 2]
        how = "whole" if problem == "GPT-2" else "layers"
        yield _case(problem, storage, horizon, how, 2 + number % 2, 1, SCHEDULES[number % 4])
    for schedule in ("list", "program.csv", "program.txt", "auto"):
        yield _case("large layers", "disk", 1, "layers", 2, 1, schedule, steps=7 if schedule == "auto" else 5)
    for number, (storage, (pp, tp, rdp)) in enumerate(itertools.product(STORAGES, ((1, 2, 1), (2, 2, 1), (1, 2, 2)))):
        yield DividedCase(
            "GPT-2" if number % 2 else "Llama",
            pp,
            tp * rdp,
            "interleaved",
            2,
            tp=tp,
            optimize=("speed", "memory")[number % 2],
            batches=("different", "same", "unequal")[number % 3],
            feature=NAME,
            how=_how(storage, HORIZONS[number % 2], "layers"),
        )


def _how(storage: str, horizon: int, strategy: str) -> str:
    return f"{storage} {horizon} {strategy}"


def _case(
    problem: str, storage: str, horizon: int, strategy: str, pp: int, dp: int, schedule: str, **more: Any
) -> MemoryCase:
    how = _how(storage, horizon, strategy)
    return PipelineCase(problem, pp, dp, schedule, 4 if dp == 1 else 2, feature=NAME, how=how, **more)


CASES = list(_cases())


def ways(case: MemoryCase) -> list[str]:
    """Where to, how far ahead, and what is checkpointed."""
    return case.how.split()


def configuration(case: MemoryCase) -> dict[str, Any]:
    """What ``smp.init`` gets besides."""
    storage, horizon, _ = case.how.split()
    return {"offload_activations": storage == "host" or storage, "activation_loading_horizon": int(horizon)}


def failure(case: MemoryCase, rows: list[dict[str, Any]]) -> str | None:
    """Why the feature had not the effect that it should have; None if it had."""
    _, horizon, strategy = case.how.split()
    stored, loaded = ([row["offloaded"][name] for row in rows] for name in ("stored", "loaded"))
    text = f"tensors that went out, by rank: {stored}, and came back: {loaded}"
    if any(row["offloaded"]["bytes"] for row in rows):
        return f"something is left in a storage; {text}"
    if int(horizon) == FAR:
        return text if any(stored) else activation_checkpointing.failure(_checkpointed(case), rows)
    if case.problem == "large layers":
        # A rank with one group has nothing beyond a horizon of several tasks; with one microbatch in flight, of one.
        one = case.schedule == "zero_bubble" and case.pp == 1
        expected = 1 if strategy in ("contiguous", "whole", "group_2", "calls") and case.pp > 1 else case.pp
        if sum(number > 0 for number in loaded) < expected and not ((int(horizon) > 1 or one) and expected == 1):
            return text
    elif case.problem == "layers" and any(stored):
        return f"small tensors have left: {text}"
    return activation_checkpointing.failure(_checkpointed(case), rows)


def problem_of(case: MemoryCase, problem: Any) -> Any:
    """Return the problem as it is."""
    return problem


def before_step(models: dict[str, Any], case: MemoryCase, step: int) -> None:
    """Mark modules of the models on this rank."""
    activation_checkpointing.before_step(models, _checkpointed(case), step)


def _checkpointed(case: MemoryCase) -> MemoryCase:
    return dataclasses.replace(case, how=case.how.split()[2])
