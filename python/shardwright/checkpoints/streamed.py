"""A rank's part of a checkpoint out of host memory, or out of devices by way of two locked buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright._core import CheckpointMemory, CheckpointWriter, PartInBackground
from shardwright.checkpoints.boxes import Region
from shardwright.checkpoints.staging import Staging

#: A name, values, the shape of the whole tensor, and what the values are of it.
Given = tuple[str, torch.Tensor, list[int], Region]


def write_part(writer: CheckpointWriter, name: str, given: Sequence[Given]) -> str:
    """Write this rank's file; what is in host memory without a copy, unless something is on a device.

    Args:
        writer: Writes the checkpoint.
        name: The file.
        given: The pieces.

    Returns:
        The report for the manifest.

    Raises:
        ShardwrightError: A piece makes no sense, or the disk is full, and so on.
    """
    staging = Staging()
    if not any(staging.serves(view) for _, view, _, _ in given):
        return writer.write_part(name, given)
    part = writer.begin_part(name, _described(given))
    try:
        # Hashed and written while the next block is copied.
        for block in staging.blocks(given[place][1] for place in part.order()):
            part.write(block)
    finally:
        staging.settle()
    return part.finish()


def copy_part(
    writer: CheckpointWriter, name: str, given: Sequence[Given], memory: CheckpointMemory
) -> PartInBackground:
    """Copy pieces to host memory, and let a thread write them.

    The copy is the only one: what is on a device comes into it by way of two locked buffers.

    Args:
        writer: Writes the checkpoint.
        name: The file.
        given: The pieces.
        memory: Where the copy is.

    Raises:
        ShardwrightError: A piece makes no sense, or an earlier part could not be written.
    """
    staging = Staging()
    if not any(staging.serves(view) for _, view, _, _ in given):
        return writer.write_part_in_background(name, given, memory)
    copy = writer.begin_part_in_background(name, _described(given), memory)
    try:
        for block in staging.blocks(view for _, view, _, _ in given):
            copy.write(block)
    finally:
        staging.settle()
    return copy.finish()


def _described(given: Sequence[Given]) -> list[tuple[str, str, list[int], Region]]:
    return [(name, str(view.dtype).removeprefix("torch."), shape, region) for name, view, shape, region in given]
