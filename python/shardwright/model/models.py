"""The models of a rank, and the optimizers that train them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwright.job.wrapped import WrappedModels

if TYPE_CHECKING:
    from shardwright.model.distributed import DistributedModel
    from shardwright.model.placement import Placement


class Models:
    """Each ``DistributedModel`` of this rank, as the layers above execution see them.

    Attributes:
        optimizers: The distributed optimizers.
        pending_controls: The requests by which a decision was sent to the pipeline's other ranks.
    """

    def __init__(self, wrapped: WrappedModels) -> None:
        """There are none."""
        self._wrapped = wrapped
        self.optimizers: list[Any] = []
        self.pending_controls: list[int] = []

    def add_model(self, model: DistributedModel) -> int:
        """Number a model; the script alone keeps it alive."""
        return self._wrapped.add(model)

    @property
    def num_models(self) -> int:
        """How many models there have been."""
        return self._wrapped.count

    @property
    def models(self) -> list[DistributedModel]:
        """The models that are still in use, or that no garbage collection has found yet."""
        return self._wrapped.alive

    @property
    def placements(self) -> list[Placement]:
        """Where the modules of each of them live. A placement's model lives only while somebody holds it."""
        return [model.placement for model in self.models]

    def placement(self, model_id: int) -> Placement:
        """Where the modules of the model with this id live.

        Raises:
            ShardwrightError: This rank has no such model (any more).
        """
        placement: Placement = self._wrapped.placement_of(model_id)
        return placement

    def optimizer_of(self, model: DistributedModel) -> Any:
        """The distributed optimizer that trains a model, None when there is none yet."""
        return next((optimizer for optimizer in self.optimizers if optimizer.trains(model)), None)
