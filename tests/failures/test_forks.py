"""Forked processes leave the job alone."""

from __future__ import annotations

from tests.jobs.job import Job


def test_the_training_goes_on_while_a_data_loader_and_a_child_are_forked_off() -> None:
    with Job("forking") as job:
        codes = job.all_end(90)
        for rank, process in enumerate(job.ranks):
            errors = [step["error"] for step in process.events("step")]
            assert len(errors) == 20, process.err
            assert max(errors) < 1e-10
            (child,) = process.events("child")
            assert child["code"] == 0
            barrier, stats, shutdown = child["said"].splitlines()
            assert "forked" in barrier, barrier
            assert f"rank {rank}" not in stats
            assert shutdown == "shutdown: done"
            assert "Traceback" not in process.err
    assert codes == [0, 0]
