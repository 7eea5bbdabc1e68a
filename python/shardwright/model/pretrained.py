"""What saves models in the layout of ``transformers``, and loads them; found by its type, since it is a layer above."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shardwright.model.distributed import DistributedModel


class PretrainedFolders(Protocol):
    """Saves and loads folders of models."""

    def save(self, model: DistributedModel, folder: str | os.PathLike[str], max_shard_size: int | str) -> None:
        """Save a model; all ranks call this."""

    def load(self, model: DistributedModel, folder: str | os.PathLike[str], *, strict: bool) -> None:
        """Load a model; all ranks call this."""
