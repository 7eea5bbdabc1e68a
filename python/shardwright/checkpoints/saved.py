"""A checkpoint that is open for reading."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright._core import CheckpointReader
from shardwright.checkpoints.boxes import Piece
from shardwright.checkpoints.claims import check_form, wrong
from shardwright.checkpoints.dtypes import DTYPES
from shardwright.checkpoints.places import place_of
from shardwright.checkpoints.saving import HUGGINGFACE_CONFIG
from shardwright.checkpoints.staging import Box, Staging
from shardwright.errors import ShardwrightError

#: Read at once, into memory besides that of the tensors.
_BATCH_BYTES = 256 << 20

#: What an imported checkpoint says besides tensors, and what it does not.
_IMPORTED = {HUGGINGFACE_CONFIG, "content", "extra_states", "optimizer", "equal"}
_NOTHING_ELSE: dict[str, Any] = {"content": None, "extra_states": {}, "placement": None, "optimizer": None}

#: Sides of tensors are signed.
_MAX_SIDE = 1 << 63

Kinds = dict[str, tuple[str, tuple[int, ...]]]


class Saved:
    """A checkpoint that is open for reading.

    Attributes:
        manifest: What it holds.
        kinds: The dtype and the shape of each tensor, by all its names.
        content: What was saved besides tensors, as JSON.
        has_extra_states: Whether it says what modules keep that is no tensor; files of other libraries may not.
    """

    def __init__(self, path: str | os.PathLike[str], tag: str | None) -> None:
        """Open it; by default the newest."""
        self._reader = CheckpointReader(place_of(path), tag)
        self.manifest: dict[str, Any] = json.loads(self._reader.manifest)
        for each in self.manifest["tensors"]:
            if each["dtype"] not in DTYPES or any(side >= _MAX_SIDE for side in each["shape"]):
                allowed = f"{', '.join(DTYPES)}, of less than 2**63 elements in each dimension"
                raise wrong(f"tensor {each['name']!r}", f"{each['dtype']} {each['shape']}", allowed)
        self.kinds: Kinds = {
            each["name"]: (DTYPES[each["dtype"]], tuple(each["shape"])) for each in self.manifest["tensors"]
        }
        self.content: dict[str, Any] = self.manifest["user_content"]
        for alias in self.manifest["aliases"]:
            self.kinds[alias["name"]] = self.kinds[alias["of"]]
        self._saved_as: dict[str, str] = {}
        self._again: Kinds = {}
        if not isinstance(self.content, dict) or not ("placement" in self.content or self.content.keys() <= _IMPORTED):
            raise ShardwrightError(
                "it was not saved by smp.save_checkpoint nor imported: what it says besides tensors is unknown"
            )
        self.has_extra_states = "extra_states" in self.content
        self.content = {**_NOTHING_ELSE, **self.content}
        check_form(self.content)

    def tie(self, aliases: Mapping[str, str]) -> None:
        """Find a tensor under another of its names, where an imported model has only that, or equal ones under both.

        Args:
            aliases: Further names of the model's tensors, and the names that it reads these by.
        """
        for alias, name in aliases.items():
            if name not in self.kinds and alias in self.kinds:
                self._saved_as[name] = alias
                self.kinds[name] = self.kinds.pop(alias)
            elif any({alias, name} <= {*names} for names in self.content.get("equal", ())):
                self._again[alias] = self.kinds.pop(alias)

    def differences(self, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
        """Return how tensors differ from those that were saved, a line for each difference."""
        return self._reader.differences(
            [
                (self._saved_as.get(name, name), dtype, list(shape))
                for name, (dtype, shape) in {**wanted, **self._again}.items()
            ]
        )

    @torch.no_grad()
    def read(self, pieces: Sequence[Piece]) -> None:
        """Read pieces into their memory; no tensor is changed before all of a batch, or of a buffer, is verified."""
        staging = Staging()
        of_devices = [piece for piece in pieces if staging.serves(piece.view)]
        pieces = [piece for piece in pieces if not staging.serves(piece.view)]
        batch: list[Piece] = []
        size = 0
        for piece in sorted(pieces, key=lambda piece: (piece.name, piece.offset)):
            batch.append(piece)
            size += piece.view.nbytes
            if size >= _BATCH_BYTES:
                self._read_batch(batch)
                batch, size = [], 0
        self._read_batch(batch)
        of_devices.sort(key=lambda piece: (piece.name, piece.offset))
        staging.load((piece.view, functools.partial(self._read_boxes, piece)) for piece in of_devices)

    def _read_boxes(self, piece: Piece, boxes: Sequence[tuple[torch.Tensor, Box]]) -> None:
        """Read boxes of a piece into contiguous tensors in host memory."""
        name = self._saved_as.get(piece.name, piece.name)
        self._reader.read(
            [
                (name, into, ([a + b for a, b in zip(piece.offset, first, strict=True)], list(size), None))
                for into, (first, size) in boxes
            ]
        )

    def _read_batch(self, batch: Sequence[Piece]) -> None:
        taken = [(piece, torch.empty(piece.size, dtype=piece.view.dtype)) for piece in batch if math.prod(piece.size)]
        self._reader.read([(self._saved_as.get(piece.name, piece.name), into, piece.region) for piece, into in taken])
        for piece, values in taken:
            piece.view.copy_(values)

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Read all tensors whose names begin with ``prefix``, whole; return them by name."""
        found = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (dtype, shape) in self.kinds.items()
            if name.startswith(prefix)
        }
        self.read([Piece(name, tuple(one.shape), (0,) * one.dim(), one) for name, one in found.items()])
        return found
