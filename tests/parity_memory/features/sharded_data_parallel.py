"""Sharded data parallelism: every stage, in groups of ranks and over all of them, with and without a pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..cases import MemoryCase, PipelineCase
from . import activation_checkpointing

if TYPE_CHECKING:
    import torch

    from tests.parity.problem import Problem

NAME = "sharded_data_parallel"
#: A norm that no gradient of these problems has.
LARGE = 1e6
#: What is done beside training with shards: nothing; gradients are clipped in ``step()``, or before it; modules are
#: checkpointed.
HOWS = ("plain", "clipped", "clipped by the script", "checkpointed")
CLIP = 0.01


def _cases() -> Iterator[MemoryCase]:
    for stage in (1, 2, 3):
        for number, problem in enumerate(("GPT-2", "T5", "odd MLP")):
            yield _case(problem, "plain", 1, 2, 2, stage)
            yield _case(problem, "clipped", 1, 4, 2, stage, microbatches=1 + number % 2)
            yield _case(problem, ("plain", "clipped", "checkpointed")[(number + stage) % 3], 2, 2, 2, stage)
        yield _case("GPT-2", "checkpointed", 1, 2, 2, stage)
        yield _case("odd MLP", "clipped by the script", 1, 2, 2, stage)
        yield _case("odd MLP, accumulated", "clipped", 1, 2, 2, stage)
        yield _case("odd MLP", "plain", 1, 4, 4, stage, schedule="interleaved", threshold=0)
    yield _case("odd MLP, accumulated", "plain", 2, 2, 2, 3)
    for number, schedule in enumerate(("simple", "looped", "zero_bubble")):
        yield _case("odd MLP", HOWS[number], 2, 2, 2, 1 + number, schedule=schedule, threshold=5)


def _case(
    problem: str,
    how: str,
    pp: int,
    dp: int,
    degree: int,
    stage: int,
    *,
    schedule: str = "interleaved",
    microbatches: int = 2,
    threshold: int = 20,
) -> MemoryCase:
    keys = (
        ("sharded_data_parallel_degree", degree),
        ("sdp_stage", stage),
        ("sdp_param_persistence_threshold", threshold),
        ("sdp_gradient_clipping", CLIP if how == "clipped" else LARGE),
    )
    return PipelineCase(problem, pp, dp, schedule, microbatches, keys=keys, feature=NAME, how=how)


CASES = list(_cases())


def ways(case: MemoryCase) -> list[str]:
    """The stage, and what is done beside it."""
    return [f"stage {dict(case.keys)['sdp_stage']}", case.how]


def configuration(case: MemoryCase) -> dict[str, Any]:
    """What ``smp.init`` gets besides the keys of the case: nothing."""
    return {}


def failure(case: MemoryCase, rows: list[dict[str, Any]]) -> str | None:
    """Why the feature had not the effect that it should have; None if it had."""
    degree = dict(case.keys)["sharded_data_parallel_degree"]
    if any(not row["sharded"] for row in rows):
        return f"sharded parameters by rank: {[row['sharded'] for row in rows]}"
    elements, held = sum(row["elements"] for row in rows), sum(row["held"] for row in rows)
    if elements != held * degree:
        return f"the ranks hold {held} elements of {elements}, sharded over {degree}"
    if dict(case.keys)["sdp_param_persistence_threshold"] > 0 and not any(row["whole"] for row in rows):
        return "no parameter is below the threshold"
    if case.how == "checkpointed" and not all(row["recomputed"] for row in rows):
        return f"second computations by rank: {[row['recomputed'] for row in rows]}"
    return None


def problem_of(case: MemoryCase, problem: Problem) -> Problem:
    """The problem with the clipping of the case, which one process does before its update."""
    clip = LARGE if case.how in ("plain", "checkpointed") else CLIP
    return dataclasses.replace(problem, accounted=False, clip=clip)


def update(run: Any, name: str, clip_and_step: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Step an optimizer; returns the norm of the gradients, before they are clipped."""
    optimizer = run.optimizers[name]
    if run.case.how == "clipped by the script":
        return clip_and_step(name)
    optimizer.step()
    norm: torch.Tensor = optimizer._global_grad_norm
    return norm


def before_step(models: dict[str, Any], case: MemoryCase, step: int) -> None:
    """Mark modules of the models on this rank."""
    if case.how == "checkpointed":
        activation_checkpointing.before_step(models, dataclasses.replace(case, how="layers"), step)
