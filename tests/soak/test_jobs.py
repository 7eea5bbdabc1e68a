"""The short form of ``make soak``: what a few jobs and a few failing steps leave behind."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import TRANSPORTS, Run, run

#: A job of every kind twice.
JOBS = 22
STEPS = 200


def check(runs: list[Run]) -> None:
    for one in runs:
        assert one.grown == {}, f"rank {one.rank}"
        assert one.unfreed == 0, f"rank {one.rank}"
        assert one.shared_growth_mb < 1.0, f"rank {one.rank}"
        assert one.late.buffer_bytes == 0, f"rank {one.rank}"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_job_leaves_no_descriptor_thread_mapping_or_shared_memory(transport: str) -> None:
    check(run("jobs", "job_after_job", JOBS, transport))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failed_step_leaves_none_either(transport: str) -> None:
    check(run("steps", "failing_steps", STEPS, transport))
