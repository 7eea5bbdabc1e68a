"""Folders of models as ``transformers`` writes and reads them, saved and loaded by all ranks, each its part."""

from __future__ import annotations

import os

from shardwright.checkpoints.pretrained.loading import load_pretrained
from shardwright.checkpoints.pretrained.saving import save_pretrained
from shardwright.job.runtime import Runtime
from shardwright.model import DistributedModel
from shardwright.model.pretrained import PretrainedFolders


class Folders(PretrainedFolders):
    """What a model calls."""

    def __init__(self, runtime: Runtime) -> None:
        """For the models of a rank."""
        self._runtime = runtime

    def save(self, model: DistributedModel, folder: str | os.PathLike[str], max_shard_size: int | str) -> None:
        """Save a model; all ranks call this."""
        save_pretrained(self._runtime, model, folder, max_shard_size)

    def load(self, model: DistributedModel, folder: str | os.PathLike[str], *, strict: bool) -> None:
        """Load a model; all ranks call this."""
        load_pretrained(self._runtime, model, folder, strict=strict)
