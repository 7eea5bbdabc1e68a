"""Layouts of ranks in which Trainer is held to one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Degrees of a job.

    Attributes:
        pipeline: The pipeline degree.
        data: The number of model replicas.
        tensor: The tensor-parallel degree, whose ranks have different samples too.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.pipeline * self.data * self.tensor

    @property
    def replicas(self) -> int:
        """How many ranks have different samples."""
        return self.data * self.tensor

    @property
    def config(self) -> dict[str, Any]:
        """What ``smp.init`` is given; the order of microbatches is fixed, so that runs are the same bit by bit."""
        return {
            "pipeline_parallel_degree": self.pipeline,
            "tensor_parallel_degree": self.tensor,
            "ddp": self.replicas > 1,
            "microbatches": 2,
            "deterministic_server": True,
        }

    @property
    def parameters(self) -> dict[str, Any]:
        """The same, as the launcher of the original library says it."""
        config = self.config
        return {"partitions": config.pop("pipeline_parallel_degree"), **config}


LAYOUTS = {
    "plain": Layout(),
    "pp2": Layout(pipeline=2),
    "pp2xdp2": Layout(pipeline=2, data=2),
    "tp2": Layout(tensor=2),
}
