"""The models of a rank, and the optimizers that train them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwright.job.wrapped import WrappedModels

if TYPE_CHECKING:
    from shardwright.model.distributed import DistributedModel
    from shardwright.model.placement import Placement


class Models(WrappedModels):
    """What the layers above execution know of the wrapped models besides: their placements, and who trains them.

    Attributes:
        optimizers: The distributed optimizers.
        pending_controls: The requests by which a decision was sent to the pipeline's other ranks.
    """

    def __init__(self, rank: int) -> None:
        """There are none."""
        super().__init__(rank)
        self.optimizers: list[Any] = []
        self.pending_controls: list[int] = []

    @property
    def placements(self) -> list[Placement]:
        """Where the modules of each of them live. A placement's model lives only while somebody holds it."""
        return [model.placement for model in self.alive]

    def optimizer_of(self, model: DistributedModel) -> Any:
        """The distributed optimizer that trains a model, None when there is none yet."""
        return next((optimizer for optimizer in self.optimizers if optimizer.trains(model)), None)
