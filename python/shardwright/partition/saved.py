"""A partition in a file: which pp_rank runs each module."""

from __future__ import annotations

import json
import os
from typing import Any

from shardwright.errors import PartitionError
from shardwright.partition.decision import Decision
from shardwright.partition.manual import ManualPlacement
from shardwright.partition.tree import ModelTree

_FORMAT_VERSION = 1


def partition_path(cfg: Any, model_id: int) -> str | None:
    """Return the file of a model's partition; None without the key ``partition_file``."""
    path: str | None = cfg.partition_file
    return path if path is None or model_id == 0 else f"{path}.{model_id}"


def write_partition(path: str, decision: Decision) -> None:
    """Write a partition, so that the file is there whole or as it was before.

    Raises:
        PartitionError: The file cannot be written.
    """
    content = {
        "format_version": _FORMAT_VERSION,
        "pipeline_parallel_degree": decision.num_devices,
        "modules": dict(decision.modules),
    }
    beside = f"{path}.writing"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(beside, path)
    except OSError as error:
        raise PartitionError(f"partition_file {path!r} cannot be written: {error.strerror}") from error


def read_partition(path: str, tree: ModelTree, num_devices: int) -> list[ManualPlacement]:
    """Read a partition of a model for this many devices.

    Raises:
        PartitionError: The file cannot be read, or is of another model or degree.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        version, degree = content["format_version"], content["pipeline_parallel_degree"]
        modules = {str(name): int(rank) for name, rank in content["modules"].items()}
    except OSError as error:
        raise PartitionError(f"partition_file {path!r} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PartitionError(f"partition_file {path!r} is not what this library writes: {error!r}") from error
    if version != _FORMAT_VERSION:
        raise PartitionError(f"partition_file {path!r} has format_version {version}; known: {_FORMAT_VERSION}")
    if degree != num_devices:
        raise PartitionError(
            f"partition_file {path!r} is for pipeline_parallel_degree {degree}, and the job has {num_devices}: leave "
            "out load_partition to divide the model anew"
        )
    known = {entry.path for entry in tree.modules}
    differing = sorted(known ^ set(modules))
    if differing:
        where = "the model" if differing[0] in known else "the file"
        raise PartitionError(f"partition_file {path!r} is of another model: only {where} has a module {differing[0]!r}")
    return [ManualPlacement(path=name, pp_rank=rank) for name, rank in modules.items()]
