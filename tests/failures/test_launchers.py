"""Launched by whatever is there, and ended by it: every rank goes, with a line and no traceback."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Mapping

import pytest

from tests.jobs.job import Job

#: A rank that hangs is alive for ever; to end an interpreter that has torch loaded takes a busy machine seconds.
SIGNALS_END_SECONDS = 20.0
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
}
INSTALLED = [name for name in LAUNCHERS if name == "torchrun" or shutil.which(name)]


def open_mpi_environment(rank: int, world: int, port: int) -> Mapping[str, str]:
    """What Open MPI's mpirun sets, whether it is there or not."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(world),
        "PMIX_NAMESPACE": f"prterun-test-{port}@1",
    }


def slurm_environment(rank: int, world: int, port: int) -> Mapping[str, str]:
    """What srun sets."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(world),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(world),
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
    }


@pytest.mark.parametrize("launch", [open_mpi_environment, slurm_environment])
def test_the_variables_of_a_launcher_are_enough(launch: object) -> None:
    with Job("training", arguments=["train"], launch=launch) as job:  # type: ignore[arg-type]
        job.all_end_with([0, 0], 60)
        assert all(process.events("done") for process in job.ranks)


def test_one_plain_process() -> None:
    arguments = ["train", json.dumps({"pipeline_parallel_degree": 1})]
    with Job("training", 1, arguments, launch=lambda *_: {}) as job:
        job.all_end_with([0], 60)
        assert max(step["error"] for step in job[0].events("step")) < 1e-10
        assert job[0].err == ""


def test_a_script_that_ends_without_shutdown_ends_in_good_order() -> None:
    """The program never calls smp.shutdown(); nothing is said and nothing is left."""
    with Job("training", arguments=["train"]) as job:
        for process in job.ranks:
            process.event("done")
        job.all_end_with([0, 0])
        assert job[1].err == ""
        assert "Traceback" not in job[0].err


@pytest.mark.parametrize("launcher", INSTALLED)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_all_ranks_with_a_line_each(launcher: str, number: signal.Signals) -> None:
    with Job("training", 1, ["train for ever"], launcher=LAUNCHERS[launcher]) as job:
        run = job[0]
        run.wait_for("steps", lambda: len(run.events("step")) > 40, 60)
        run.signal_group(number) if number == signal.SIGINT else run.signal(number)
        (code,) = job.all_end(SIGNALS_END_SECONDS)
        text = run.err
    assert code != 0
    # torchrun prints a traceback of its own; the ranks' begins in the program.
    assert "programs/training.py" not in text
    assert sorted(re.findall(r"^shardwright: rank (\d) was (?:interrupted|terminated)$", text, re.MULTILINE)) == [
        "0",
        "1",
    ]


def test_ctrl_c_without_a_launcher() -> None:
    with Job("training", arguments=["train for ever"]) as job:
        job.events("step", number=5)
        for process in job.ranks:
            process.signal(signal.SIGINT)
        job.all_end(SIGNALS_END_SECONDS)
        for rank, process in enumerate(job.ranks):
            assert process.err.splitlines()[-1] == f"shardwright: rank {rank} was interrupted"
            assert "Traceback" not in process.err
