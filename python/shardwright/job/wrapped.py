"""The wrapped models of a rank, by id."""

from __future__ import annotations

import weakref
from typing import Any

from shardwright.errors import ShardwrightError


class WrappedModels:
    """Each ``smp.DistributedModel`` of a rank; the script alone keeps them alive."""

    def __init__(self, rank: int) -> None:
        """There are none."""
        self._rank = rank
        self._models: list[weakref.ref[Any]] = []

    def add(self, model: Any) -> int:
        """Number a model."""
        self._models.append(weakref.ref(model))
        return len(self._models) - 1

    @property
    def count(self) -> int:
        """How many there have been."""
        return len(self._models)

    @property
    def alive(self) -> list[Any]:
        """Those that are still in use, or that no garbage collection has found yet."""
        return [model for reference in self._models if (model := reference()) is not None]

    def placement_of(self, model_id: int) -> Any:
        """Where the modules of the model with this id live.

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
