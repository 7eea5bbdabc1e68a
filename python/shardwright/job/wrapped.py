"""The wrapped models of a rank, by id."""

from __future__ import annotations

import weakref
from typing import Any

from shardwright.errors import ShardwrightError


class WrappedModels:
    """Each ``smp.DistributedModel`` of a rank; the script alone keeps them alive."""

    def __init__(self, rank: int) -> None:
        """Create an empty registry."""
        self._rank = rank
        self._models: list[weakref.ref[Any]] = []

    def add(self, model: Any) -> int:
        """Register a model, and return its id."""
        self._models.append(weakref.ref(model))
        return len(self._models) - 1

    @property
    def count(self) -> int:
        """The number of models registered so far."""
        return len(self._models)

    @property
    def alive(self) -> list[Any]:
        """The models that have not been garbage-collected."""
        return [model for reference in self._models if (model := reference()) is not None]

    def placement_of(self, model_id: int) -> Any:
        """Return the placement of the model with this id.

        Raises:
            ShardwrightError: This rank has no such model (any more).
        """
        model = self._models[model_id]() if model_id < len(self._models) else None
        if model is None:
            raise ShardwrightError(
                f"rank {self._rank} was asked for model {model_id}, which does not exist there (any more); every rank "
                "must build the same models in the same order and keep them as long as the others do"
            )
        return model.placement
