"""Interfaces of partitioned models for execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import nn

from shardwright.job.runtime import Runtime
from shardwright.job.wrapped import WrappedModels

if TYPE_CHECKING:
    from shardwright.execution.stateful import StatefulModules
    from shardwright.execution.task import RunningTask


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """State of modules that forwards change.

    Microbatches come to its users in their order, and never two at once (EX-15).

    Attributes:
        names: Full names of the buffers and attributes that hold it, and ``module.variable`` of global variables.
        users: The paths of the modules that read or write it, with how often each runs in a forward.
    """

    names: tuple[str, ...]
    users: Mapping[str, int]


class Decided(Protocol):
    """The partition of a model."""

    @property
    def modules(self) -> Mapping[str, int]:
        """The pp_rank that runs each module, by path."""

    @property
    def follows(self) -> Mapping[str, Sequence[int]]:
        """The pp_ranks that run a module with whoever calls it, for those that no rank owns."""

    @property
    def kept(self) -> Sequence[KeptState]:
        """What modules keep."""

    @property
    def attributes(self) -> Mapping[str, Sequence[int]]:
        """The attributes that forwards set, with the pp_ranks on which they do."""

    @property
    def temporaries(self) -> Sequence[str]:
        """Those of them that each forward sets before anything reads them."""

    @property
    def reads(self) -> Mapping[str, Sequence[int]]:
        """The attributes that modules on other pp_ranks read, with those pp_ranks."""


class Placed(Protocol):
    """The placement of the modules of a model."""

    @property
    def model_id(self) -> int:
        """The model's id, the same on all ranks."""

    @property
    def kept(self) -> StatefulModules | None:
        """What modules keep here; None before they are placed, and where all are on one rank."""

    @property
    def one_at_a_time(self) -> bool:
        """Whether microbatches must not overlap in it."""

    def wait_until_placed(self, task: RunningTask) -> None:
        """On a worker of a peer: see to it that the main thread has taken the decision over."""

    def module_of(self, module_id: int) -> nn.Module:
        """The module with this id."""

    def name_of(self, module_id: int) -> str:
        """Its name."""

    def is_divided(self, module: nn.Module) -> bool:
        """Whether modules inside it live on other ranks."""


def placed_models(runtime: Runtime) -> list[Placed]:
    """Return the placements of all models of a rank."""
    return [model.placement for model in runtime[WrappedModels].alive]


def placed_model(runtime: Runtime, model_id: int) -> Placed:
    """Return the placement of a model.

    Raises:
        ShardwrightError: This rank has no such model (any more).
    """
    placed: Placed = runtime[WrappedModels].placement_of(model_id)
    return placed
