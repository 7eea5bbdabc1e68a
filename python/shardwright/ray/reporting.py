"""Checkpoints in Ray's storage: saved by all ranks, and reported once they are complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray.train

from shardwright.checkpoints import resume_from_checkpoint, save_checkpoint
from shardwright.checkpoints.together import on_all_ranks
from shardwright.errors import ConfigError
from shardwright.job.runtime import current_runtime
from shardwright.model import DistributedModel

#: The name of the checkpoint in its folder, which Ray keeps, counts and deletes as a whole.
_TAG = "shardwright"


def report(
    metrics: Mapping[str, Any],
    *,
    user_content: Any = None,
    model: DistributedModel | None = None,
    optimizer: Any = None,
) -> None:
    """Save a checkpoint in the storage of the run, and report it with metrics to Ray Train. All ranks call this.

    Each rank writes its part there. Ray hears of the checkpoint when it is complete, so that neither a restart nor
    ``Result.checkpoint`` ever has half of one. Once this returns, a restart goes on from it. To report metrics only,
    call ``ray.train.report``.

    Args:
        metrics: The metrics; Ray keeps those of rank 0.
        user_content: What else is saved, such as ``{"epoch": epoch}``; see ``smp.save_checkpoint``.
        model: The model; by default the job's only one.
        optimizer: What ``smp.DistributedOptimizer`` returned; by default the only one that trains the model.

    Raises:
        CheckpointError: The save failed on a rank; on all ranks, and nothing is reported.
        ConfigError: The storage is neither a folder nor one that speaks S3.
    """
    storage = ray.train.get_context().get_storage()
    is_first = current_runtime().place.rank == 0
    # Names that are chosen by time differ between ranks, and between restarts.
    name = on_all_ranks(
        "shardwright.ray.report", lambda: storage.make_default_checkpoint_dir_name() if is_first else None
    )[0]
    path = storage.build_checkpoint_path_from_name(name)
    save_checkpoint(
        _place_of(storage.storage_filesystem, path), _TAG, model=model, optimizer=optimizer, user_content=user_content
    )
    ray.train.report(
        dict(metrics),
        checkpoint=ray.train.Checkpoint(path, filesystem=storage.storage_filesystem) if is_first else None,
        checkpoint_dir_name=name,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )
    # Else a worker that dies now would take the report with it, and a restart go on from an older checkpoint.
    ray.train.get_all_reported_checkpoints(consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED)


def resume(
    *,
    strict: bool = True,
    load_optimizer: bool = True,
    model: DistributedModel | None = None,
    optimizer: Any = None,
) -> Any:
    """Load the newest checkpoint that was reported, with any number of workers and any degrees. All ranks call this.

    Call it once model and optimizer are wrapped. The arguments are those of ``smp.resume_from_checkpoint``.

    Returns:
        The user content, with tensors on the CPU; None if nothing was reported yet.

    Raises:
        CheckpointError: The checkpoint is none of :func:`report`, is damaged, or is not of this model.
    """
    is_first = current_runtime().place.rank == 0

    def newest() -> str | None:
        found = ray.train.get_checkpoint() if is_first else None
        return None if found is None else _place_of(found.filesystem, found.path)

    # After a report, only the rank that has reported the checkpoint knows of it.
    path = on_all_ranks("shardwright.ray.resume", newest)[0]
    if path is None:
        return None
    return resume_from_checkpoint(
        path, _TAG, strict=strict, load_optimizer=load_optimizer, model=model, optimizer=optimizer
    )


def _place_of(filesystem: Any, path: str) -> str:
    """Return where Ray's storage is, in the words of ``smp.save_checkpoint``.

    Raises:
        ConfigError: It is neither a folder nor one that speaks S3.
    """
    if filesystem.type_name == "local":
        return path
    if filesystem.type_name == "s3":
        return f"s3://{path}"
    raise ConfigError(
        f"the storage of the run is a file system of the kind {filesystem.type_name!r}; allowed: a folder that all "
        "nodes share, or s3://BUCKET/PREFIX, as storage_path of ray.train.RunConfig"
    )
