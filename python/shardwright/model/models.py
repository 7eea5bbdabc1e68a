"""The wrapped models of a rank, and the optimizers that train them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwright.job.wrapped import WrappedModels

if TYPE_CHECKING:
    from shardwright.model.distributed import DistributedModel
    from shardwright.model.placement import Placement


class Models(WrappedModels):
    """The wrapped models of a rank, with their placements and the distributed optimizers that train them.

    Attributes:
        pending_controls: The requests by which a decision was sent to the other ranks of the pipeline.
    """

    def __init__(self, rank: int) -> None:
        """Start without models."""
        super().__init__(rank)
        self.optimizers: list[Any] = []
        self.pending_controls: list[int] = []

    @property
    def placements(self) -> list[Placement]:
        """The placement of each model. A placement keeps its model alive only while a reference to the model exists."""
        return [model.placement for model in self.alive]

    def optimizer_of(self, model: DistributedModel) -> Any:
        """Return the distributed optimizer that trains a model; None if there is none yet."""
        return next((optimizer for optimizer in self.optimizers if optimizer.trains(model)), None)
