"""Ways to bring a state to the disk and back, each until it is there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from shardwright._core import CheckpointMemory, CheckpointReader, CheckpointWriter, PartInBackground

State = dict[str, torch.Tensor]
_TAG = "step"


def flush(path: Path) -> None:
    """Bring a file, or all in a folder, to the disk."""
    paths = [path, *path.rglob("*")] if path.is_dir() else [path]
    for one in [*paths, path.parent]:
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forget(path: Path) -> None:
    """Make the kernel forget what it has in memory of a file, or of all in a folder."""
    flush(path)
    for one in path.rglob("*") if path.is_dir() else [path]:
        if one.is_file():
            descriptor = os.open(one, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _pieces(state: State) -> list[tuple[str, torch.Tensor, list[int], tuple[list[int], list[int], None]]]:
    whole = ((name, one, list(one.shape)) for name, one in state.items())
    return [(f"model/{name}", one, shape, ([0] * len(shape), shape, None)) for name, one, shape in whole]


def _commit(writer: CheckpointWriter, *reports: str) -> None:
    """As of a pipeline whose ranks each wrote one part."""
    degrees = dict.fromkeys(("tensor", "reduced_data", "optimizer_sharding", "sharded_data"), 1)
    degrees["pipeline"] = len(reports)
    description = {"library_version": "0", "step": 1, "degrees": degrees, "partition": [], "aliases": []}
    writer.commit(json.dumps({**description, "user_content": None}), list(reports))


def save_ours(state: State, path: Path) -> None:
    """One part, and the manifest; both flush what they write."""
    writer = CheckpointWriter(path, _TAG)
    _commit(writer, writer.write_part("part-0.safetensors", _pieces(state)))


def save_stages(state: State, path: Path) -> None:
    """As a pipeline of two ranks does: each writes the layers of its stage."""
    writer, pieces = CheckpointWriter(path, _TAG), _pieces(state)
    half = len(pieces) // 2
    stages = (pieces[:half], pieces[half:])
    _commit(writer, *(writer.write_part(f"part-{rank}.safetensors", stage) for rank, stage in enumerate(stages)))


def begin_ours(state: State, path: Path, memory: CheckpointMemory) -> PartInBackground:
    """What a save in the background does before it returns."""
    return CheckpointWriter(path, _TAG).write_part_in_background("part-0.safetensors", _pieces(state), memory)


def end_ours(path: Path, part: PartInBackground) -> None:
    """What it does later."""
    _commit(CheckpointWriter(path, _TAG), part.wait())


def load_ours(into: State, path: Path) -> int:
    """Every chunk is verified; returns the bytes that were read."""
    reader = CheckpointReader(path)
    _, _, nbytes = reader.read([(name, one, part) for name, one, _, part in _pieces(into)])
    return nbytes


def save_torch(state: State, path: Path) -> None:
    """``torch.save``, and a flush."""
    torch.save(state, path)
    flush(path)


def load_torch(_: State, path: Path) -> State:
    """``torch.load`` into new memory, as it has no other way."""
    loaded: State = torch.load(path, weights_only=True)
    return loaded


def save_dcp(state: State, path: Path) -> None:
    """``torch.distributed.checkpoint`` in one process, which flushes its files."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True), no_dist=True)
    flush(path)


def load_dcp(into: State, path: Path) -> None:
    """In place, as ours."""
    dcp.load(into, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def save_copy(source: Path, path: Path) -> None:
    """The kernel copies a file that it has in memory, and a flush."""
    shutil.copyfile(source, path)
    flush(path)


def load_copy(into: Mapping[str, torch.Tensor], path: Path) -> None:
    """A file's bytes into memory that is there, without looking at them."""
    with path.open("rb", buffering=0) as file:
        for tensor in into.values():
            rest = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise EOFError(path)
                rest = rest[count:]
