"""Which models take part in a step's collectives: those that every data-parallel rank still has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.errors import ShardwrightError
from shardwright.objects import receive_on, send_on

if TYPE_CHECKING:
    from shardwright.model.placement import Placement
    from shardwright.runtime import Runtime

_CHANNEL = "models"


def participants(runtime: Runtime, placements: Sequence[Placement]) -> list[Placement]:
    """Those of some models that all data-parallel ranks have; they all call this.

    A model lives as long as somebody holds it, which each rank's garbage collection ends at a time of its own. Where
    there was never more than one, nothing is exchanged.
    """
    if runtime.collectives is None or runtime.num_models < 2:
        return list(placements)
    others = [rank for rank in runtime.dp_ranks if rank != runtime.rank]
    common = {placement.model_id for placement in placements}
    for rank in others:
        send_on(runtime, rank, _CHANNEL, (runtime.step, sorted(common)))
    for rank in others:
        common.intersection_update(_said_by(runtime, rank))
    return [placement for placement in placements if placement.model_id in common]


def check_left_out(runtime: Runtime, placements: Sequence[Placement], taking_part: Sequence[Placement]) -> None:
    """Raise if a model that does not take part has gradients in this step.

    Raises:
        ShardwrightError: There is such a model.
    """
    for placement in placements:
        if placement not in taking_part and any(one.grad is not None for one in placement.owned_parameters()):
            raise ShardwrightError(
                f"model {placement.model_id} was trained on rank {runtime.rank}, but not all data-parallel ranks "
                f"{runtime.dp_ranks} have it any more; every rank must keep a model as long as the others do"
            )


def _said_by(runtime: Runtime, rank: int) -> list[int]:
    while True:
        step, models = receive_on(runtime, rank, _CHANNEL)
        if step == runtime.step:  # and not of one that failed
            return list(models)
