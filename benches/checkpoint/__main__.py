"""Measures saving and loading of a state beside ``torch.save``, ``torch.distributed.checkpoint`` and a plain copy.

usage: python -m benches.checkpoint [--gib 2] [--rounds 3] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from shardwright._core import CheckpointMemory

from benches.checkpoint import ways
from benches.checkpoint.figures import BARS, Measured, figures, table
from benches.communication.figures import conclude
from benches.resident import forget_peak, peak_bytes

#: Of most tensors.
TENSOR_BYTES = 32 << 20
#: Of the disk, as a multiple of the state: a source to copy, and what four ways write.
ROOM = 6


def _state(nbytes: int) -> ways.State:
    """Random numbers, which nothing on the way can make smaller."""
    torch.manual_seed(0)
    return {
        f"layer{number}.weight": torch.randn(TENSOR_BYTES // 4096, 1024) for number in range(nbytes // TENSOR_BYTES)
    }


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - begun
    del kept
    return seconds


def _round(number: int, state: ways.State, into: ways.State, folder: Path, measured: Measured) -> None:
    """All ways once, each round beginning with another one; each is given a disk that has nothing to do."""
    source = folder / "source"
    savers: dict[str, Callable[[Path], object]] = {
        "ours": lambda path: ways.save_ours(state, path),
        "torch": lambda path: ways.save_torch(state, path),
        "dcp": lambda path: ways.save_dcp(state, path),
        "copy": lambda path: ways.save_copy(source, path),
    }
    loaders: dict[str, Callable[[Path], object]] = {
        "ours": lambda path: ways.load_ours(into, path),
        "torch": lambda path: ways.load_torch(into, path),
        "dcp": lambda path: ways.load_dcp(into, path),
        "copy": lambda path: ways.load_copy(into, path),
    }
    names = list(savers)
    order = names[number % len(names) :] + names[: number % len(names)]
    for name in order:
        path = folder / name
        ways.remove(path)
        source.read_bytes()  # the copy's source is in memory, as the others' is
        os.sync()
        before = forget_peak()
        measured.save.setdefault(name, []).append(_seconds(lambda: savers[name](path)))  # noqa: B023
        if name == "ours":
            measured.memory.setdefault("save", []).append(peak_bytes() - before)
    for name in order:
        path = folder / name
        ways.forget(path)
        for tensor in into.values():
            tensor.zero_()
        before = forget_peak()
        measured.load.setdefault(name, []).append(_seconds(lambda: loaders[name](path)))  # noqa: B023
        if name == "ours":
            measured.memory.setdefault("load", []).append(peak_bytes() - before)
        if name != "torch" and not all(torch.equal(into[key], state[key]) for key in state):
            raise SystemExit(f"{name} does not give what was saved")
        ways.remove(path)


def _reshard(state: ways.State, into: ways.State, folder: Path, measured: Measured) -> None:
    """A checkpoint of layout 2x1x1 is loaded by one of the ranks of 1x1x2, which both read the same."""
    path = folder / "stages"
    ways.save_stages(state, path)
    ways.forget(path)
    for tensor in into.values():
        tensor.zero_()
    before = forget_peak()
    begun = time.perf_counter()
    nbytes = ways.load_ours(into, path)
    measured.reshard.append(time.perf_counter() - begun)
    measured.memory.setdefault("load under another layout", []).append(peak_bytes() - before)
    measured.read.append(nbytes / sum(tensor.nbytes for tensor in state.values()))
    if not all(torch.equal(into[key], state[key]) for key in state):
        raise SystemExit("a checkpoint of two stages does not give what was saved")
    ways.remove(path)


def _background(
    state: ways.State, into: ways.State, memory: CheckpointMemory, folder: Path, measured: Measured
) -> None:
    """How long the caller of a save in the background waits, beside one copy."""

    def copy() -> None:
        for key, tensor in state.items():
            into[key].copy_(tensor)

    path = folder / "ours"
    os.sync()
    measured.memcpy.append(_seconds(copy))
    parts = []
    measured.block.append(_seconds(lambda: parts.append(ways.begin_ours(state, path, memory))))
    ways.end_ours(path, parts[0])
    ways.remove(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-checkpoint", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="the size of the state")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="where to write; it has to be on a disk")
    args = parser.parse_args()
    nbytes = int(args.gib * 2**30) // TENSOR_BYTES * TENSOR_BYTES
    if args.rounds < 1 or not nbytes:
        parser.error("--rounds has to be 1 or more, and --gib 0.04")
    args.folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(args.folder).free < ROOM * nbytes:
        parser.error(f"{args.folder} has no room for {ROOM} times the state")
    state = _state(nbytes)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    measured = Measured()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="bench-checkpoint-") as scratch:
        folder = Path(scratch)
        with (folder / "source").open("wb") as file:
            for tensor in state.values():
                file.write(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
        ways.flush(folder / "source")
        for number in range(-1, args.rounds):  # the first one does not count
            print(f"\rround {number + 1}/{args.rounds} ", end="", file=sys.stderr, flush=True)
            _round(number, state, into, folder, measured if number >= 0 else Measured())
            _reshard(state, into, folder, measured if number >= 0 else Measured())
        memory = CheckpointMemory()
        before = forget_peak()
        for number in range(-1, args.rounds):
            _background(state, into, memory, folder, measured if number >= 0 else Measured())
        measured.memory["save in the background"] = [peak_bytes() - before]
    print(file=sys.stderr)
    Console(width=100).print(table(measured, nbytes))
    return conclude(figures(measured), BARS)


if __name__ == "__main__":
    sys.exit(main())
