import subprocess
import sys

import pytest
from shardwright._core import LaunchInfo
from shardwright.errors import JobStartError

from tests.jobs.patience import HANG_SECONDS

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "run-7",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4242@1",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[01-04]",
    "SLURM_JOB_ID": "99",
    "SLURM_STEP_ID": "3",
}


def refused(environ: dict[str, str]) -> str:
    with pytest.raises(JobStartError) as caught:
        LaunchInfo.detect(environ)
    return str(caught.value)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_a_plain_process_is_a_job_of_one_rank() -> None:
    info = LaunchInfo.detect({"PATH": "/bin"})
    assert (info.launcher, info.rank, info.world_size, info.local_rank, info.local_size) == ("single", 0, 1, 0, 1)
    assert (info.rendezvous_host, info.rendezvous_port, info.single_host) == (None, None, True)


def test_torchrun() -> None:
    info = LaunchInfo.detect(TORCHRUN)
    assert (info.launcher, info.rank, info.world_size, info.local_rank, info.local_size) == ("torchrun", 3, 4, 1, 2)
    assert (info.rendezvous_host, info.rendezvous_port, info.single_host) == ("node-0", 29400, False)
    assert info.job_id == "torchrun/run-7/0"


def test_a_restart_by_torchrun_is_another_job_on_one_host() -> None:
    """Over several hosts, each agent counts for itself."""
    for local, same in (("4", False), ("2", True)):
        first = {**TORCHRUN, "LOCAL_WORLD_SIZE": local, "LOCAL_RANK": "1"}
        again = {**first, "TORCHELASTIC_RESTART_COUNT": "1"}
        assert (LaunchInfo.detect(first).job_id == LaunchInfo.detect(again).job_id) == same


def test_any_launcher_may_set_the_variables_of_torchrun() -> None:
    info = LaunchInfo.detect(without(TORCHRUN, "TORCHELASTIC_RUN_ID"))
    assert (info.launcher, info.rank, info.rendezvous_port) == ("environment", 3, 29400)


def test_local_ranks_need_not_be_set_where_the_rendezvous_is_the_loopback() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5000"}
    info = LaunchInfo.detect(environ)
    assert (info.local_rank, info.local_size, info.single_host) == (1, 2, True)
    assert "LOCAL_RANK is not set" in refused({**environ, "MASTER_ADDR": "node-0"})


def test_open_mpi_on_one_host_meets_at_a_loopback_port_that_all_ranks_derive() -> None:
    info = LaunchInfo.detect(OPEN_MPI)
    assert (info.launcher, info.rank, info.world_size, info.local_rank) == ("openmpi", 1, 2, 1)
    assert (info.rendezvous_host, info.single_host) == ("127.0.0.1", True)
    other = LaunchInfo.detect({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert (other.rendezvous_port, other.job_id) == (info.rendezvous_port, info.job_id)
    next_job = LaunchInfo.detect({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-host-4243@1"})
    assert next_job.rendezvous_port != info.rendezvous_port
    assert info.rendezvous_port is not None
    assert 1024 <= info.rendezvous_port < 32768


def test_the_derived_port_is_the_same_in_every_process() -> None:
    script = f"from shardwright._core import LaunchInfo; print(LaunchInfo.detect({OPEN_MPI!r}).rendezvous_port)"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    assert int(found.stdout) == LaunchInfo.detect(OPEN_MPI).rendezvous_port


def test_open_mpi_without_a_job_id_says_what_to_set() -> None:
    assert "set MASTER_PORT on every rank" in refused(without(OPEN_MPI, "PMIX_NAMESPACE"))
    assert LaunchInfo.detect({**without(OPEN_MPI, "PMIX_NAMESPACE"), "MASTER_PORT": "5000"}).rendezvous_port == 5000


def test_ranks_on_several_hosts_without_an_address_are_told_what_to_set() -> None:
    for environ in ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, SRUN, without(TORCHRUN, "MASTER_ADDR")):
        text = refused(environ)
        assert "set MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port there) on every rank" in text


def test_srun_counts_the_tasks_of_its_node() -> None:
    info = LaunchInfo.detect({**SRUN, "MASTER_ADDR": "node01", "MASTER_PORT": "6000"})
    assert (info.launcher, info.rank, info.world_size, info.local_rank, info.local_size) == ("srun", 5, 7, 1, 2)
    assert (info.single_host, info.job_id) == (False, "slurm/99.3/0")


@pytest.mark.parametrize(
    "described",
    [
        {"SLURM_STEP_TASKS_PER_NODE": "4"},
        {"SLURM_TASKS_PER_NODE": "4(x1)"},
        {"SLURM_NTASKS_PER_NODE": "4"},
        {"SLURM_NNODES": "1"},
        {},
    ],
)
def test_srun_on_one_host_meets_at_the_loopback(described: dict[str, str]) -> None:
    info = LaunchInfo.detect(
        {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2", "SLURM_JOB_ID": "1", **described}
    )
    assert (info.local_size, info.single_host, info.rendezvous_host) == (4, True, "127.0.0.1")


def test_srun_that_runs_fewer_tasks_than_allocated_counts_those_it_runs() -> None:
    environ = {**SRUN, "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "7", "MASTER_ADDR": "a", "MASTER_PORT": "6000"}
    assert LaunchInfo.detect(environ).world_size == 7


def test_srun_with_an_unknown_number_of_tasks_per_node_says_what_to_set() -> None:
    environ = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    assert "set SLURM_NTASKS_PER_NODE" in refused(environ)
    assert "'2(x3'" in refused({**environ, "SLURM_TASKS_PER_NODE": "2(x3"})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"RANK": "four"}, "RANK is 'four'; allowed: an integer of 0 or more"),
        ({"RANK": "-1"}, "RANK is '-1'; allowed: an integer of 0 or more"),
        ({"RANK": "4"}, "RANK is 4; allowed: 0 to 3"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; allowed: an integer of 1 or more"),
        ({"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; allowed: 1 to 65535"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(change: dict[str, str], expected: str) -> None:
    assert expected in refused({**TORCHRUN, **change})


def test_half_of_a_launchers_variables_are_refused() -> None:
    assert "WORLD_SIZE is not set" in refused({"RANK": "0"})
    assert "OMPI_COMM_WORLD_LOCAL_RANK is not set" in refused(without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"))


def test_torchrun_inside_mpirun_or_srun_counts() -> None:
    assert LaunchInfo.detect({**SRUN, **OPEN_MPI, **TORCHRUN}).launcher == "torchrun"


def test_the_answer_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        LaunchInfo.detect(TORCHRUN).rank = 0  # type: ignore[misc]


def test_one_rank_needs_no_rendezvous_under_any_launcher() -> None:
    alone = [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"},
        {f"OMPI_COMM_WORLD_{name}": number for name, number in (("RANK", "0"), ("SIZE", "1"))}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    ]
    for environ in alone:
        info = LaunchInfo.detect(environ)
        assert (info.world_size, info.rendezvous_port, info.single_host) == (1, None, True)
