"""By the script's seed too, pipelines drop the same elements in training with evaluations in between as without."""

from __future__ import annotations

import pytest
import torch
from shardwright.job.runtime import Runtime

from tests.execution.masks_program import MICROBATCHES, losses_of
from tests.frames.job import Job, in_process_ranks

Losses = list[list[float]]


def trained(program: int, *, looks: bool) -> Losses:
    """The losses of a drawn program over two ranks, a job of its own: training steps are counted from its start."""

    def main(runtime: Runtime) -> Losses:
        torch.set_default_dtype(torch.float64)
        return losses_of(program, divides=False, looks=looks)

    with in_process_ranks():
        job = Job(2)
        try:
            first, second = job.run(main, {"microbatches": MICROBATCHES, "deterministic_server": True})
        finally:
            job.close()
    if isinstance(first, BaseException):
        raise first
    assert first == second
    return first


@pytest.mark.parametrize("program", range(6))
def test_evaluations_and_failed_steps_take_nothing_from_training(program: int) -> None:
    alone = trained(program, looks=False)
    assert len({loss for step in alone for loss in step}) == len(alone) * MICROBATCHES, "random numbers repeat"
    assert trained(program, looks=True) == alone
