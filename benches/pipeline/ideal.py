"""The makespan of a schedule if nothing but its tasks took any time, as the simulator has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwright import _core

Policy = Literal["simple", "interleaved", "zero_bubble", "looped"]


@dataclass(frozen=True)
class StageCosts:
    """What a stage takes for a microbatch, in seconds."""

    forward: float
    input_gradient: float
    weight_gradient: float


def program_makespan(program: str, costs: Sequence[StageCosts]) -> float:
    """When the last task ends if every rank runs its tasks in order, each as soon as what it needs is there.

    Args:
        program: A fixed order of tasks per rank, as text or as the CSV of ``torch.distributed.pipelining``.
        costs: By stage.

    Returns:
        Seconds.
    """
    return _makespan(costs, program=program)


def policy_makespan(
    placement: Sequence[int], costs: Sequence[StageCosts], num_microbatches: int, policy: Policy, active: int
) -> float:
    """When the last task ends if each rank chooses among what is ready as the library's execution server does.

    Calls are predicted, as in static mode, and the loss is the last stage's.

    Args:
        placement: By stage, its rank.
        costs: By stage.
        num_microbatches: In the step.
        policy: The schedule.
        active: How many microbatches may be in flight at once, except with ``simple``.

    Returns:
        Seconds.
    """
    schedule = policy if policy == "simple" else f"{policy}(active={active})"
    return _makespan(
        costs, schedule=schedule, segments=list(placement), microbatches=num_microbatches, control="predicted"
    )


def _makespan(costs: Sequence[StageCosts], **what: Any) -> float:
    step = _core.simulate(
        forward_ns=[_nanoseconds(each.forward) for each in costs],
        backward_ns=[_nanoseconds(each.input_gradient + each.weight_gradient) for each in costs],
        weight_gradient_ns=[_nanoseconds(each.weight_gradient) for each in costs],
        **what,
    )
    return float(step["makespan_ns"]) * 1e-9


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
