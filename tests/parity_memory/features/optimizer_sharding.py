"""Optimizer state that is sharded over replicas, with several optimizers, and with activation checkpointing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..cases import DividedCase, MemoryCase, PipelineCase
from . import activation_checkpointing

NAME = "optimizer_sharding"
SHARDED = (("shard_optimizer_state", True),)
#: Optimizers by their names in ``tests/optimizer_sharding``; the last needs whole parameters.
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "asgd", "adafactor")
SCHEDULES = activation_checkpointing.SCHEDULES
STATIC = activation_checkpointing.STATIC
PLACES = ((1, 2), (2, 2), (1, 3))


def _cases() -> Iterator[MemoryCase]:
    for number, optimizer in enumerate(OPTIMIZERS):
        for turn, (pp, dp) in enumerate(PLACES):
            problem = ("large layers", "layers", "structures")[(number + turn) % 3]
            yield _case(problem, optimizer, pp, dp, SCHEDULES[(number + turn) % 4])
    for number, checkpointing in enumerate(("layers", "whole", "layers nested", "each")):
        for turn, (pp, dp) in enumerate(((1, 2), (2, 2))):
            problem = ("large layers", "layers", "shared")[(number + turn) % 3]
            yield _case(problem, f"{('adamw', 'adafactor')[turn]}, {checkpointing}", pp, dp, SCHEDULES[number])
    for number, problem in enumerate(("GPT-2", "T5", "BERT", "Llama", "ResNet, in-place")):
        yield _case(problem, "sgd", 2 + number % 2, 2, SCHEDULES[number % 4])
        yield _case(problem, "sgd, layers", 2, 2, SCHEDULES[(number + 1) % 4])
    for options in ((("overlapping_allreduce", False),), (("bucket_cap_mb", 0.01), ("gradient_as_bucket_view", True))):
        yield _case("large layers", "adamw", 2, 2, "interleaved", options=options)
    yield _case("large layers", "adamw", 2, 2, "interleaved", keys=(*SHARDED, *STATIC))
    yield _case("large layers", "adamw", 2, 2, "interleaved", delayed=True)
    for number, problem in enumerate(("GPT-2", "Llama", "DistributedTransformer")):
        for pp, tp, rdp in ((1, 2, 1), (2, 2, 1), (1, 2, 2)):
            yield DividedCase(
                problem,
                pp,
                tp * rdp,
                "interleaved",
                2,
                tp=tp,
                optimize=("speed", "memory")[number % 2],
                batches=("different", "same", "unequal")[number],
                keys=SHARDED,
                feature=NAME,
                how="sgd, layers" if rdp > 1 else "sgd",
            )


def _case(problem: str, how: str, pp: int, dp: int, schedule: str, **more: Any) -> MemoryCase:
    return PipelineCase(problem, pp, dp, schedule, 2, feature=NAME, how=how, **{"keys": SHARDED, **more})


CASES = list(_cases())


def ways(case: MemoryCase) -> list[str]:
    """Return the ways of a case."""
    return case.how.split(", ")


def configuration(case: MemoryCase) -> dict[str, Any]:
    """Return the configuration keys beside those that the case names."""
    return {}


def problem_of(case: MemoryCase, problem: Any) -> Any:
    """The problem with the case's optimizer; bytes are those of a share."""
    from tests.optimizer_sharding.problems import with_optimizer

    return with_optimizer(problem, case.how.partition(", ")[0])


def failure(case: MemoryCase, rows: list[dict[str, Any]]) -> str | None:
    """Why the feature had not the effect that it should have; None if it had."""
    if without := [rank for rank, row in enumerate(rows) if row["parameters"] and row["owned"] == 0]:
        return f"ranks {without} own no elements of their parameters"
    # A stage of divided layers has nothing with owners; with replicas, everything has.
    without = [rank for rank, row in enumerate(rows) if row["parameters"] and row["owned"] is None]
    has_replicas = not isinstance(case, DividedCase) or case.dp > case.tp
    if without and (has_replicas or len(without) == len(rows)):
        return f"no parameter of ranks {without} has owners"
    return activation_checkpointing.failure(_checkpointed(case), rows) if ", " in case.how else None


def before_step(models: dict[str, Any], case: MemoryCase, step: int) -> None:
    """Mark modules of the models on this rank, where activation checkpointing is on too."""
    if ", " in case.how:
        activation_checkpointing.before_step(models, _checkpointed(case), step)


def _checkpointed(case: MemoryCase) -> MemoryCase:
    return dataclasses.replace(case, how=case.how.partition(", ")[2])
