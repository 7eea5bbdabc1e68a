"""A folder of safetensors files in the layout of ``transformers``, mapped into memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from shardwright.checkpoints.dtypes import DTYPES
from shardwright.errors import CheckpointError

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_SIZE_BYTES = 8


class Place(NamedTuple):
    """Where a tensor is: the file, its bytes there, its dtype and its shape."""

    file: str
    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Folder:
    """A folder with ``model.safetensors``, or with the files of ``model.safetensors.index.json``.

    Attributes:
        path: The folder.
        places: Where each tensor is, by its name.
    """

    def __init__(self, path: str) -> None:
        """Read the headers of all files.

        Raises:
            CheckpointError: There are no such files, or what one says of itself cannot be true.
        """
        self.path = path
        self.places: dict[str, Place] = {}
        self._mapped: dict[str, torch.Tensor] = {}
        index = self._index()
        for name in sorted({*index.values()} if index is not None else {SINGLE}):
            self._add(os.path.join(path, name), None if index is None else {one for one in index if index[one] == name})

    def _index(self) -> dict[str, str] | None:
        if os.path.exists(os.path.join(self.path, SINGLE)):
            return None
        path = os.path.join(self.path, INDEX)
        if not os.path.exists(path):
            hint = ""
            if os.path.exists(os.path.join(self.path, "pytorch_model.bin")):
                hint = (
                    "; pytorch_model.bin is a pickle, which cannot be read in parts: let transformers load it and "
                    "save_pretrained write it anew"
                )
            raise CheckpointError(f"{self.path!r} has neither {SINGLE} nor {INDEX}{hint}")
        found = _parsed(path, _read(path)).get("weight_map")
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and os.path.basename(name) == name and name not in ("", ".", "..")
            for name in found.values()
        ):
            raise CheckpointError(f"{path!r} is damaged: its weight_map makes no sense")
        return found

    def _add(self, path: str, expected: set[str] | None) -> None:
        """Add the tensors of a file, which have to be those that the index says."""
        try:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(_SIZE_BYTES), "little")
                rest = os.fstat(file.fileno()).st_size - _SIZE_BYTES - size
                if size > _MAX_HEADER_BYTES or rest < 0:
                    raise CheckpointError(f"{path!r} is damaged, or no file of safetensors")
                header = _parsed(path, file.read(size))
        except OSError as error:
            raise CheckpointError(f"cannot read {path!r}: {error.strerror}") from error
        header.pop("__metadata__", None)
        if expected is not None and header.keys() != expected:
            name = min(header.keys() ^ expected)
            raise CheckpointError(f"{path!r} and {INDEX} differ: only one of them has tensor {name!r}")
        for name, about in header.items():
            try:
                dtype, shape = getattr(torch, DTYPES[about["dtype"]]), tuple(about["shape"])
                begin, end = about["data_offsets"]
                nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{path!r} is damaged: what it says of {name!r} makes no sense") from error
            if end - begin != nbytes or not 0 <= begin <= end <= rest:
                raise CheckpointError(f"{path!r} is damaged: tensor {name!r} is not where its header says")
            data = _SIZE_BYTES + size
            self.places[name] = Place(path, data + begin, data + end, dtype, shape)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor whose bytes are read from the file when they are used."""
        place = self.places[name]
        if place.begin == place.end:
            return torch.empty(place.shape, dtype=place.dtype)
        mapped = self._mapped.get(place.file)
        if mapped is None:
            size = os.path.getsize(place.file)
            mapped = self._mapped[place.file] = torch.from_file(place.file, shared=False, size=size, dtype=torch.uint8)
        data = mapped[place.begin : place.end]
        if place.begin % place.dtype.itemsize:  # no view of such bytes is possible
            data = data.clone()
        return data.view(place.dtype).view(place.shape)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise CheckpointError(f"cannot read {path!r}: {error.strerror}") from error


def _parsed(path: str, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path!r} is damaged: {error}") from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path!r} is damaged: it has no table of tensors")
    return dict(found)
