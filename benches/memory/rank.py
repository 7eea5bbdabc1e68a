"""One of the processes that train as one row of the table does.

usage: python -m benches.memory.rank NAME SOCKET, as a rank of a job
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from benches.memory.rows import ROWS
from benches.ranks import serve


class Training:
    """What a rank can be told."""

    def __init__(self, name: str) -> None:
        """Nothing is built yet."""
        self.rank = int(os.environ["RANK"])
        self._row = next(row for row in ROWS if row.name == name)
        self._made: Any = None
        self._idle_bytes = 0

    def build(self) -> None:
        """Import what is needed, count what that takes, and build the row."""
        import torch

        torch.set_num_threads(1)
        if self._row.side == "ours":
            from benches.memory.our_side import Shardwright as Side
        else:
            from benches.memory.torch_side import Torch as Side  # type: ignore[assignment]
        self._idle_bytes = _status("VmRSS")
        self._made = Side(**self._row.options)

    def step(self) -> dict[str, float]:
        """Run a step; when it began and ended, in seconds of a clock that both ranks share, and the loss."""
        self._made.barrier()
        began = time.monotonic()
        loss = self._made.step()
        return {"began": began, "ended": time.monotonic(), "loss": loss}

    def forget_peak(self) -> None:
        """Let the kernel count the peak anew."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The most memory that was resident since, above that of the process before anything was built."""
        return _status("VmHWM") - self._idle_bytes

    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        found: int = self._made.optimizer_bytes()
        return found

    def offloaded_bytes(self) -> int:
        """The bytes of optimizer state on a disk, and the most of activations that were offloaded at once."""
        found: int = self._made.offloaded_bytes()
        return found

    def moved_bytes(self) -> int:
        """Bytes of activations that each step moves out."""
        found: int = self._made.moved_bytes()
        return found

    def close(self) -> None:
        """Leave."""
        if self._made is not None:
            self._made.close()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024


def main() -> None:
    name, address = sys.argv[1:]
    serve(Training(name), address)


if __name__ == "__main__":
    main()
