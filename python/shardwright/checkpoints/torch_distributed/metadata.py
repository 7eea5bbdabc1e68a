"""The ``.metadata`` of ``torch.distributed.checkpoint``, a pickle, read without running what is in it."""

from __future__ import annotations

import math
import os
import pickle
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from shardwright.errors import CheckpointError

#: In the folder, next to files with tensors.
METADATA_NAME = ".metadata"

_METADATA = torch_metadata.__name__
#: What a pickle may name: classes that only hold what they are given.
_ALLOWED = {
    *((_METADATA, name) for name in (*torch_metadata.__all__, "_MEM_FORMAT_ENCODING")),
    (_StorageInfo.__module__, _StorageInfo.__name__),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "PurePosixPath")),
}


class _Unpickler(pickle.Unpickler):
    """Builds what ``.metadata`` is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class by its name, if it may be in a pickle."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _ALLOWED or is_dtype:
            return super().find_class(module, name)
        raise _Refused(f"{module}.{name}")


class _Refused(pickle.UnpicklingError):
    """What a pickle names is none of the classes that may be in it."""


def read_metadata(folder: str) -> torch_metadata.Metadata:
    """Read what a checkpoint of ``torch.distributed.checkpoint`` says of itself.

    Raises:
        CheckpointError: There is none, it is damaged, or it would run code.
    """
    path = os.path.join(folder, METADATA_NAME)
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file).load()
    except OSError as error:
        raise CheckpointError(
            f"{folder!r} is no checkpoint of torch.distributed.checkpoint: cannot read {path!r}: {error.strerror}"
        ) from error
    except _Refused as refused:
        raise CheckpointError(
            f"{path!r} is a pickle that names {refused}, which no metadata of torch.distributed.checkpoint has. "
            "Reading it could run code of whoever wrote it, so it is refused"
        ) from None
    except Exception as error:  # what a damaged pickle raises is not known
        _damaged(path, f"{type(error).__name__}: {error}")
    _check(path, found)
    return found  # type: ignore[no-any-return]


def _check(path: str, found: Any) -> None:
    """Raise if the content is not what torch writes, or points outside of the folder."""
    if type(found) is not torch_metadata.Metadata:
        _damaged(path, f"it has a {type(found).__name__}")
    state, storage = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
    if not isinstance(state, dict) or not isinstance(storage, dict):
        _damaged(path, "it lists no tensors")
    kinds = (torch_metadata.TensorStorageMetadata, torch_metadata.BytesStorageMetadata)
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, kinds):
            _damaged(path, f"what it says of {key!r} makes no sense")
        if isinstance(value, torch_metadata.TensorStorageMetadata):
            _check_tensor(path, key, value, storage)
    for index, place in storage.items():
        if not isinstance(index, torch_metadata.MetadataIndex) or not isinstance(place, _StorageInfo):
            _damaged(path, "what it says of places in files makes no sense")
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name:
            _damaged(path, f"{name!r} is no name of a file in the folder")


def _check_tensor(path: str, key: str, tensor: torch_metadata.TensorStorageMetadata, storage: dict[Any, Any]) -> None:
    """Raise if parts of a tensor are missing, which would be read as anything."""
    try:
        covered = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        inside = all(
            begin >= 0 and size >= 0 and begin + size <= side
            for chunk in tensor.chunks
            for begin, size, side in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        )
        there = all(torch_metadata.MetadataIndex(key, chunk.offsets) in storage for chunk in tensor.chunks)
        is_whole = inside and there and covered == math.prod(tensor.size)
        is_whole = is_whole and isinstance(tensor.properties.dtype, torch.dtype)
    except (AttributeError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        _damaged(path, f"parts of tensor {key!r} are missing, or make no sense")


def _damaged(path: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{path!r} is damaged, or is not of torch.distributed.checkpoint: {problem}")
