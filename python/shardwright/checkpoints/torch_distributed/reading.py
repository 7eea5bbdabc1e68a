"""Reads tensors and values of a checkpoint of ``torch.distributed.checkpoint``, without running what is in it."""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from shardwright.checkpoints.torch_distributed.metadata import read_metadata
from shardwright.errors import CheckpointError

#: The names of containers from the outermost on, and numbers of items in lists.
Path = tuple[str | int, ...]


class _Reader(FileSystemReader):
    """torch's reader, with metadata that was read already."""

    def __init__(self, folder: str, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata."""
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """torch's planner, which reads values without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read a value."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{name!r} is a pickle of more than tensors and plain values. Reading it would run the code in it, so "
                f"it is refused; save what it has as plain values. What torch says: {str(error).splitlines()[0]}"
            ) from None


class TorchCheckpoint:
    """A checkpoint of ``torch.distributed.checkpoint``.

    Attributes:
        folder: Where it is.
        tensors: The dtype and the shape of each tensor, by its name.
        paths: Where each tensor and value is in the nested state dict, by its name.
    """

    def __init__(self, folder: str) -> None:
        """Open it.

        Raises:
            CheckpointError: There is none, it is damaged, or it would run code.
        """
        self.folder = folder
        self._metadata = read_metadata(folder)
        if getattr(self._metadata, "storage_meta", None) is None:
            self._metadata.storage_meta = StorageMeta()
        self._reader = _Reader(folder, self._metadata)
        entries = self._metadata.state_dict_metadata
        self.tensors = {
            name: (one.properties.dtype, tuple(one.size))
            for name, one in entries.items()
            if isinstance(one, TensorStorageMetadata)
        }
        planned = getattr(self._metadata, "planner_data", None)
        self.paths = {name: _path(planned, name) for name in entries}

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Read tensors and values by their names.

        Raises:
            CheckpointError: A file is missing or damaged, or a value would run code.
        """
        found: dict[str, Any] = {}
        for name in names:
            kind = self.tensors.get(name)
            found[name] = None if kind is None else torch.empty(kind[1], dtype=kind[0])
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with alone(f"cannot read {self.folder!r}"):
            load(found, storage_reader=self._reader, planner=planner, no_dist=True)
        return found


@contextlib.contextmanager
def alone(problem: str) -> Iterator[None]:
    """Let torch read or write in this process alone, and raise what it met with under the name of the problem."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        cause = next(failure[0] for failure in error.failures.values())
        if isinstance(cause, CheckpointError) or not isinstance(cause, Exception):
            raise cause from None
        raise CheckpointError(f"{problem}: {type(cause).__name__}: {cause}") from error


def _path(planned: Any, name: str) -> Path:
    """Where a tensor or value is, as torch's planner has written it down; else it is at the top."""
    path = planned.get(name) if isinstance(planned, dict) else None
    if isinstance(path, tuple) and all(type(part) in (str, int) for part in path) and ".".join(map(str, path)) == name:
        return path
    return (name,)
