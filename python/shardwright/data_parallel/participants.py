"""Which models take part in a step's collectives: those that every data-parallel rank still has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.errors import ShardwrightError
from shardwright.job.objects import exchange_in_step
from shardwright.job.runtime import Runtime

if TYPE_CHECKING:
    from torch import nn

    from shardwright.tensor_parallel.module import ShardedTensors

_CHANNEL = "models"


class ModelPart(Protocol):
    """This rank's part of a model, whose id is the same on all ranks, as data parallelism sees it."""

    runtime: Runtime
    model_id: int
    module: nn.Module

    @property
    def over_rdp(self) -> set[int]:
        """The ``id`` of the parameters and buffers that are divided over tensor-parallel ranks."""

    @property
    def is_sharded(self) -> bool:
        """Whether modules are divided over several tensor-parallel ranks."""

    @property
    def sharded(self) -> ShardedTensors:
        """The tensors that are."""

    def owned_parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank."""

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Those of them whose gradients the library averages over replicas: all that are not sharded."""

    def owned_buffers(self) -> list[tuple[nn.Module, str]]:
        """The buffers of this rank, as their modules and names."""


Part = TypeVar("Part", bound=ModelPart)


def participants(runtime: Runtime, placements: Sequence[Part], num_models: int) -> list[Part]:
    """Those of some models that all data-parallel ranks have; they all call this.

    A model lives as long as somebody holds it, which each rank's garbage collection ends at a time of its own. Where
    there was never more than one, nothing is exchanged.
    """
    if runtime[ReplicaCollectives].dp is None or num_models < 2:
        return list(placements)
    own = sorted(placement.model_id for placement in placements)
    common = set(own).intersection(*exchange_in_step(runtime, runtime.place.other_roots(), _CHANNEL, own).values())
    return [placement for placement in placements if placement.model_id in common]


def check_left_out(runtime: Runtime, placements: Sequence[ModelPart], taking_part: Sequence[ModelPart]) -> None:
    """Raise if a model that does not take part has gradients in this step."""
    for placement in placements:
        if placement not in taking_part and any(one.grad is not None for one in placement.owned_parameters()):
            raise ShardwrightError(
                f"model {placement.model_id} was trained on rank {runtime.place.rank}, but not all data-parallel ranks "
                f"{runtime.place.dp_ranks} have it any more; every rank must keep a model as long as the others do"
            )
