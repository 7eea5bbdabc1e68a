"""One of two processes that hold one side, and run training steps of it.

usage: python -m benches.tensor_parallel.rank SIDE,FILE SOCKET, as a rank of a job; SIDE is ``dtensor``, ``hand``,
``speed``, ``memory`` or ``sequence``; FILE is what ``benches.tensor_parallel.reference`` wrote
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from benches.ranks import serve
from benches.tensor_parallel.model import MICROBATCHES, State

#: What the kernel takes as: the peak of resident memory starts anew.
_FORGET_PEAK = "5"


class Side(Protocol):
    """A way to divide the model."""

    model: Any

    def step(self, microbatches: tuple[torch.Tensor, ...]) -> float:
        """Add up the mean gradient over microbatches; the mean loss."""

    def gradients(self, expected: State) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Names, gradients and what they have to be."""

    def barrier(self) -> None:
        """Wait for the other rank."""

    def close(self) -> None:
        """Leave."""


def _make(name: str, weights: State) -> Side:
    if name == "dtensor":
        from benches.tensor_parallel.with_dtensor import WithDTensor

        return WithDTensor(weights)
    if name == "hand":
        from benches.tensor_parallel.by_hand import ByHand

        return ByHand(weights)
    from benches.tensor_parallel.our_side import Ours

    return Ours(weights, name)


class Training:
    """What the rank of a side can be told."""

    def __init__(self, name: str, file: str) -> None:
        """Nothing is built yet."""
        self.rank = int(os.environ["RANK"])
        self._name, self._file = name, file

    def build(self) -> None:
        """Build the model and its optimizer."""
        name, file = self._name, self._file
        reference = torch.load(file, mmap=True)
        self._microbatches = reference["ids"].chunk(MICROBATCHES)
        self._side = _make(name, reference["weights"])
        self._optimizer = torch.optim.AdamW(self._side.model.parameters(), lr=1e-3)

    def error(self) -> dict[str, float]:
        """How far loss and gradients of the first step are from those of one process, relative to the largest."""
        reference = torch.load(self._file, mmap=True)
        loss = self._side.step(self._microbatches)
        compared = self._side.gradients(reference["gradients"])
        self._optimizer.zero_grad()
        worst = max(float((found - right).abs().max() / right.abs().max()) for _, found, right in compared)
        return {"loss": abs(loss / reference["loss"] - 1), "gradients": worst}

    def step(self) -> dict[str, float]:
        """When a step began and ended here, in seconds of a clock that both ranks share, and its processor time."""
        self._side.barrier()
        began, used = time.monotonic(), time.process_time()
        self._optimizer.zero_grad()
        loss = self._side.step(self._microbatches)
        self._optimizer.step()
        return {"began": began, "ended": time.monotonic(), "cpu": time.process_time() - used, "loss": loss}

    def peak_bytes(self) -> int:
        """The most memory that was resident in this process in a step."""
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
        self.step()
        told = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in told if line.startswith("VmHWM"))

    def close(self) -> None:
        """Leave."""
        self._side.close()


class Passes:
    """What the rank of parallel linears can be told."""

    def __init__(self) -> None:
        """Nothing is built yet."""
        self.rank = int(os.environ["RANK"])

    def build(self) -> None:
        """Build them."""
        from benches.tensor_parallel.sequence import Sequences

        self._sequences = Sequences()

    def error(self) -> float:
        """How far both kinds are apart."""
        return self._sequences.difference()

    def passes(self, kind: str, number: int) -> dict[str, float]:
        """As :meth:`Training.step`, for several passes."""
        self._sequences.barrier()
        began, used = time.monotonic(), time.process_time()
        self._sequences.passes(kind, number)
        return {"began": began, "ended": time.monotonic(), "cpu": time.process_time() - used}

    def close(self) -> None:
        """Leave."""
        self._sequences.close()


def main() -> None:
    """Serve one side."""
    kind, address = sys.argv[1:]
    name, _, file = kind.partition(",")
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[int(os.environ["RANK"]) % len(processors)]})
    torch.set_num_threads(1)
    serve(Passes() if name == "sequence" else Training(name, file), address)


if __name__ == "__main__":
    main()
