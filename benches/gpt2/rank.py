"""One of two processes that hold one or more configurations and run steps of them.

usage: python -m benches.gpt2.rank NAMES SOCKET, as a rank of a job; NAMES are configurations with commas between them:
``single``, ``halves``, ``ddp``, ``torch/SCHEDULE/SPLIT``, ``ours/SCHEDULE/PARTITION[/ACTIVE]``
"""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any, Protocol

from benches.ranks import serve


class Configuration(Protocol):
    """A way to run the training step, with its own model and optimizer."""

    #: Whether this rank takes no part.
    idle: bool

    def step(self) -> float | None:
        """Run one step; the mean loss over the microbatches that this rank knows, if it does."""

    def barrier(self) -> None:
        """Wait for the other rank."""

    def close(self) -> None:
        """Leave."""


def _make(name: str) -> Configuration:
    if name.startswith("ours/"):
        from benches.gpt2.our_side import Shardwright

        return Shardwright(*name.split("/")[1:])
    if name.startswith("torch/"):
        from benches.gpt2.torch_side import TorchPipelining

        return TorchPipelining(*name.split("/")[1:])
    from benches.gpt2.plain import Plain

    return Plain(name)


class Holding:
    """What a rank can be told."""

    def __init__(self, names: str) -> None:
        """Nothing is built yet."""
        self.rank = int(os.environ["RANK"])
        self._names = names.split(",")
        self._made: dict[str, Configuration] = {}

    def build(self) -> str | None:
        """Build the configurations; or why the library does not have one of them."""
        import torch

        torch.set_num_threads(1)
        try:
            for name in self._names:
                self._made[name] = _make(name)
        except Exception as error:
            if type(error).__name__ != "ConfigError":
                raise
            return str(error)
        return None

    def step(self, name: str) -> dict[str, Any]:
        """When a step began and ended here, in seconds of a clock that both ranks share, and its loss."""
        made = self._made[name]
        made.barrier()
        began = time.monotonic()
        loss = made.step()
        return {"idle": made.idle, "began": began, "ended": time.monotonic(), "loss": loss}

    def peak_bytes(self) -> int:
        """The most memory that was resident in this process."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self) -> None:
        """Leave."""
        for made in self._made.values():
            made.close()


def main() -> None:
    names, address = sys.argv[1:]
    serve(Holding(names), address)


if __name__ == "__main__":
    main()
