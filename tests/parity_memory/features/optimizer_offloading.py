"""Optimizer state on a disk: with every kind of ranks, sharded, and with features that save memory elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..cases import DividedCase, MemoryCase, PipelineCase
from . import activation_checkpointing

NAME = "optimizer_offloading"
#: Optimizers by their names in ``tests/optimizer_sharding``.
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "nadam")
SCHEDULES = activation_checkpointing.SCHEDULES
PLACES = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2))
OFFLOADED = ("offload_optimizer", "disk")
SHARDED_STATE = ("shard_optimizer_state", True)
SHARDED = (
    ("sharded_data_parallel_degree", 2),
    ("sdp_param_persistence_threshold", 100),
    ("sdp_gradient_clipping", 1e9),
)
#: The most bytes of a chunk, and the elements at whose multiples parameters are cut.
SMALL = (8192, 64)


def _cases() -> Iterator[MemoryCase]:
    for number, optimizer in enumerate(OPTIMIZERS):
        for turn in range(2):
            pp, dp = PLACES[(number + 2 * turn) % len(PLACES)]
            problem = ("large layers", "shared", "structures")[(number + turn) % 3] if turn else "large layers"
            yield _case(problem, optimizer, pp, dp, SCHEDULES[(number + turn) % 4])
    for number, (pp, dp) in enumerate(((1, 2), (2, 2), (1, 3))):
        optimizer = ("adamw", "adagrad", "sgd")[number]
        yield _case("large layers", optimizer, pp, dp, SCHEDULES[number], keys=(SHARDED_STATE,))
    for number, (pp, dp) in enumerate(((1, 2), (2, 2))):
        yield _case("large layers", OPTIMIZERS[1 + number], pp, dp, SCHEDULES[number], keys=SHARDED)
    for number, more in enumerate(((), (("offload_activations", "disk"), ("activation_loading_horizon", 1)))):
        yield _case("large layers", "adamw, layers", 2, 1, SCHEDULES[number], keys=more)
        yield _case("large layers", "adam, layers", 2, 2, SCHEDULES[2 + number], keys=(SHARDED_STATE, *more))
    for number, problem in enumerate(("GPT-2", "T5", "BERT", "Llama")):
        yield _case(problem, "sgd", 2, 1 + number % 2, SCHEDULES[number])
    for problem, pp, batches in (("GPT-2", 1, "same"), ("Llama", 2, "different")):
        yield DividedCase(
            problem,
            pp,
            2,
            "interleaved",
            2,
            tp=2,
            optimize="speed",
            batches=batches,
            keys=(OFFLOADED,),
            feature=NAME,
            how="sgd",
        )


def _case(problem: str, how: str, pp: int, dp: int, schedule: str, keys: Any = (), **more: Any) -> MemoryCase:
    return PipelineCase(problem, pp, dp, schedule, 2, feature=NAME, how=how, keys=(OFFLOADED, *keys), **more)


CASES = list(_cases())


def ways(case: MemoryCase) -> list[str]:
    """Return the ways of a case, and the features beside."""
    return [*case.how.split(", "), *(name for name, _ in case.keys if name != OFFLOADED[0])]


def configuration(case: MemoryCase) -> dict[str, Any]:
    """Return the configuration keys beside those that the case names."""
    return {}


def problem_of(case: MemoryCase, problem: Any) -> Any:
    """The problem with the case's optimizer, in small chunks."""
    from tests.optimizer_sharding.problems import with_optimizer

    return with_optimizer(problem, case.how.partition(", ")[0])


def failure(case: MemoryCase, rows: list[dict[str, Any]]) -> str | None:
    """Why the feature had not the effect that it should have; None if it had."""
    if case.problem == "large layers" and (without := [rank for rank, row in enumerate(rows) if not row["streamed"]]):
        return f"ranks {without} have nothing of their optimizer's state on the disk"
    return activation_checkpointing.failure(_checkpointed(case), rows) if ", " in case.how else None


def before_step(models: dict[str, Any], case: MemoryCase, step: int) -> None:
    """Have small chunks, and mark modules of the models on this rank where activation checkpointing is on too."""
    from shardwright.optimizer.offloading import chunks

    chunks.CHUNK_BYTES, chunks.CUT_ELEMENTS = SMALL
    if ", " in case.how:
        activation_checkpointing.before_step(models, _checkpointed(case), step)


def _checkpointed(case: MemoryCase) -> MemoryCase:
    return dataclasses.replace(case, how=case.how.partition(", ")[2])
