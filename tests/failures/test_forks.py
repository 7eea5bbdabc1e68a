"""Forked processes leave the job alone."""

from __future__ import annotations

import signal

from tests.jobs.job import Job

#: Torch's engine would wait for ten seconds.
CHILD_SECONDS = 8.0


def test_the_training_goes_on_while_a_data_loader_and_a_child_are_forked_off() -> None:
    with Job("forking") as job:
        codes = job.all_end(90)
        for process in job.ranks:
            errors = [step["error"] for step in process.events("step")]
            assert len(errors) == 20, process.err
            assert max(errors) < 1e-10
            (child,) = process.events("child")
            assert child["code"] == 0
            *refused, shutdown = child["said"].splitlines()
            assert len(refused) == 3
            # Their locks may be held for ever, by threads that the child does not have.
            assert all(f"was forked from process {process.pid}" in text for text in refused), refused
            assert shutdown == "shutdown: done"
            (terminated,) = process.events("terminated")
            assert terminated["code"] == -signal.SIGTERM
            assert "terminated" not in process.err
            assert "Traceback" not in process.err
    assert codes == [0, 0]


def test_a_step_in_a_forked_child_is_refused_and_the_child_ends_at_once() -> None:
    # Started as a script is: ranks that are forked here end without the end of the interpreter.
    with Job("forked_step", prefix=lambda rank: []) as job:
        assert job.all_end(90) == [0, 0]
        for process in job.ranks:
            (refused,) = process.events("refused")
            assert "common.train was called in process" in refused["text"]
            assert "is no rank of the job" in refused["text"]
            (child,) = process.events("child")
            assert child["code"] == 0
            assert child["seconds"] < CHILD_SECONDS
            assert max(said["error"] for said in process.events("exact")) < 1e-10
