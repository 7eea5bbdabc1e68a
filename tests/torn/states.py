"""Two states of a job, saved in turns by two ranks, and what a reader finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from shardwright._core import CheckpointMemory, CheckpointReader, CheckpointWriter

#: Ranks that save.
RANKS = 2
#: Of the weight; with its rows, three chunks a rank, so that a save takes a while.
COLUMNS = 1025
ROWS = 4 * 650
#: How many complete checkpoints are kept.
KEEP = 2


class Found(NamedTuple):
    """What the newest checkpoint is.

    Attributes:
        step: When it was saved.
        problem: What is wrong with it; empty for nothing.
    """

    step: int
    problem: str


def state(number: int) -> dict[str, torch.Tensor]:
    """All tensors of one of the two states."""
    generator = torch.Generator().manual_seed(number % 2)
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    return {
        "model/weight": weight,
        "model/bias": torch.randn(COLUMNS, generator=generator).bfloat16(),
        "optimizer/weight/exp_avg": torch.randn(ROWS, COLUMNS, generator=generator).sign_().to(torch.int8),
        "optimizer/weight/step": torch.tensor(float(number % 2)),
    }


def pieces_of(tensors: dict[str, torch.Tensor], rank: int) -> list[tuple[str, torch.Tensor, list[int], object]]:
    """What a rank has of a state: rows, a run of elements, and of what is not divided all or nothing."""
    pieces: list[tuple[str, torch.Tensor, list[int], object]] = []
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        if name == "model/weight":
            rows = ROWS // RANKS
            region = ([rank * rows, 0], [rows, COLUMNS], None)
            pieces.append((name, tensor[rank * rows : (rank + 1) * rows], shape, region))
        elif name.endswith("exp_avg"):
            cut = [0, tensor.numel() // 3, tensor.numel()]
            run = (cut[rank], cut[rank + 1] - cut[rank])
            part = tensor.view(-1)[run[0] : run[0] + run[1]]
            pieces.append((name, part, shape, ([0, 0], shape, run)))
        elif rank == 0:
            pieces.append((name, tensor, shape, ([0] * len(shape), shape, None)))
    return pieces


def write(folder: Path, tag: str, rank: int, number: int, memory: CheckpointMemory | None = None) -> str:
    """Write a rank's part of a state, by a thread if there is memory for copies: its report."""
    writer, name, pieces = CheckpointWriter(folder, tag), f"part-{rank}.safetensors", pieces_of(state(number), rank)
    if memory is None:
        return writer.write_part(name, pieces)  # type: ignore[arg-type]
    return writer.write_part_in_background(name, pieces, memory).wait()  # type: ignore[arg-type]


def commit(folder: Path, tag: str, step: int, reports: list[str]) -> None:
    """Complete a checkpoint of the state of this step."""
    degrees = dict.fromkeys(("pipeline", "tensor", "reduced_data", "optimizer_sharding", "sharded_data"), 1)
    description = {
        "library_version": "0",
        "step": step,
        "degrees": degrees,
        "partition": [],
        "aliases": [],
        "user_content": {"state": step % 2},
    }
    CheckpointWriter(folder, tag).commit(json.dumps(description), reports, keep=KEEP)


def found(folder: Path, reader: CheckpointReader | None = None) -> Found:
    """Read the newest checkpoint: it has to verify, and to be one of both states in everything.

    Raises:
        ShardwrightError: It cannot be opened or read.
    """
    reader = reader or CheckpointReader(folder)
    problems = reader.verify()
    manifest = json.loads(reader.manifest)
    step = manifest["step"]
    expected = state(step)
    into = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    wanted = [(name, one, ([0] * one.dim(), list(one.shape), None)) for name, one in into.items()]
    reader.read(wanted)
    problems += [f"{name} is not that of the state" for name in expected if not torch.equal(into[name], expected[name])]
    if manifest["user_content"] != {"state": step % 2}:
        problems.append("the user content is not that of the state")
    if len(manifest["tensors"]) != len(expected):
        problems.append("it has other tensors")
    return Found(step, "; ".join(problems))
