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
    from shardwright.execution.untraced import UntracedState


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """State of modules that forwards change.

    Microbatches run through its users in order, and never two at once (EX-15).

    Attributes:
        names: Full names of the buffers and attributes that hold it, and ``module.variable`` for global variables.
        users: The paths of the modules that read or write it, with the number of times each runs in a forward.
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
        """The pp_ranks that run each module that no rank owns; such a module runs on the rank of its caller."""

    @property
    def kept(self) -> Sequence[KeptState]:
        """The state of modules."""

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
        """The local modules with state; None before modules are placed, and if all are on one rank."""

    @property
    def untraced(self) -> UntracedState | None:
        """What its modules hold if one rank runs all of them; None in a pipeline."""

    @property
    def one_at_a_time(self) -> bool:
        """Whether microbatches must not overlap in it."""

    def wait_until_placed(self, task: RunningTask) -> None:
        """Wait until the main thread has applied the partition, on a worker of a peer."""

    def module_of(self, module_id: int) -> nn.Module:
        """Return the module with this id."""

    def name_of(self, module_id: int) -> str:
        """Return the name of the module with this id."""

    def is_divided(self, module: nn.Module) -> bool:
        """Return whether modules inside it are on other ranks."""


def placed_models(runtime: Runtime) -> list[Placed]:
    """Return the placements of all models of a rank."""
    return [model.placement for model in runtime[WrappedModels].alive]


def placed_model(runtime: Runtime, model_id: int) -> Placed:
    """Return the placement of a model.

    Raises:
        ShardwrightError: This rank does not have the model, or no longer has it.
    """
    placed: Placed = runtime[WrappedModels].placement_of(model_id)
    return placed
