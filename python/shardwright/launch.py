"""Who started this process, and as which rank: read from the launcher's environment variables."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwright.errors import JobStartError

LOOPBACK = "127.0.0.1"

# Below the ports that Linux hands out to outgoing connections, so that none of those is in the way.
_FIRST_DERIVED_PORT, _NUM_DERIVED_PORTS = 20_000, 12_000
_MAX_PORT = 65_535

Launcher = Literal["torchrun", "environment", "openmpi", "srun", "single"]


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """This process's place among those that were started together.

    Attributes:
        launcher: ``"torchrun"``, ``"openmpi"``, ``"srun"``, ``"environment"`` (another one that sets the same
            variables as torchrun), or ``"single"``.
        rank: The global rank.
        world_size: Ranks in the job.
        local_rank: The rank among those on this host.
        local_size: Ranks on this host.
        rendezvous_host: Where the ranks meet; None for a job of one rank.
        rendezvous_port: The port there; None for a job of one rank.
        single_host: Whether all ranks are known to be on this host.
        job_id: The same text on all ranks, and another one for another job.
    """

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    rendezvous_host: str | None
    rendezvous_port: int | None
    single_host: bool
    job_id: str


def detect(environ: Mapping[str, str]) -> LaunchInfo:
    """Find out how this process was started.

    ``RANK`` and ``WORLD_SIZE`` (torchrun, and whoever sets the same) are looked at first, then the variables of Open
    MPI, then those of Slurm; a process with none of them is a job of one rank.

    Args:
        environ: The process's environment.

    Returns:
        The place of this process.

    Raises:
        JobStartError: Variables are missing, are no numbers, or contradict each other; or no address is known at which
            ranks on several hosts could meet. Says what to set.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _open_mpi(environ)
    if "SLURM_PROCID" in environ and ("SLURM_NTASKS" in environ or "SLURM_STEP_NUM_TASKS" in environ):
        return _srun(environ)
    return LaunchInfo(
        launcher="single",
        rank=0,
        world_size=1,
        local_rank=0,
        local_size=1,
        rendezvous_host=None,
        rendezvous_port=None,
        single_host=True,
        job_id="single",
    )


def _torchrun(environ: Mapping[str, str]) -> LaunchInfo:
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", least=1)
    loopback = environ.get("MASTER_ADDR") in (LOOPBACK, "localhost", "::1")
    if "LOCAL_RANK" not in environ and "LOCAL_WORLD_SIZE" not in environ and (loopback or world_size == 1):
        local_rank, local_size = rank, world_size
    else:
        local_rank, local_size = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE", least=1)
    known = run_id is not None and run_id != "none"
    return _launched(
        environ,
        launcher="environment" if run_id is None else "torchrun",
        rank=rank,
        rank_variable="RANK",
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        job_id=f"torchrun/{run_id}" if known else None,
    )


def _open_mpi(environ: Mapping[str, str]) -> LaunchInfo:
    job_id = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return _launched(
        environ,
        launcher="openmpi",
        rank=_number(environ, "OMPI_COMM_WORLD_RANK"),
        rank_variable="OMPI_COMM_WORLD_RANK",
        world_size=_number(environ, "OMPI_COMM_WORLD_SIZE", least=1),
        local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", least=1),
        job_id=f"openmpi/{job_id}" if job_id else None,
    )


def _srun(environ: Mapping[str, str]) -> LaunchInfo:
    size_variable = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, world_size = _number(environ, "SLURM_PROCID"), _number(environ, size_variable, least=1)
    local_rank = _number(environ, "SLURM_LOCALID")
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or "0"
    return _launched(
        environ,
        launcher="srun",
        rank=rank,
        rank_variable="SLURM_PROCID",
        world_size=world_size,
        local_rank=local_rank,
        local_size=_slurm_local_size(environ, rank, world_size, local_rank),
        job_id=f"slurm/{job_id}.{step}" if job_id else None,
    )


def _slurm_local_size(environ: Mapping[str, str], rank: int, world_size: int, local_rank: int) -> int:
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if tasks_per_node:
        counts = _slurm_counts(tasks_per_node)
        node = _number(environ, "SLURM_NODEID") if len(counts) > 1 else 0
        if node >= len(counts):
            raise JobStartError(f"SLURM_NODEID is {node}, but {tasks_per_node!r} describes {len(counts)} nodes")
        return counts[node]
    if "SLURM_NTASKS_PER_NODE" in environ:
        return min(_number(environ, "SLURM_NTASKS_PER_NODE", least=1), world_size)
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or environ.get("SLURM_JOB_NUM_NODES")
    if nodes == "1" or (nodes is None and local_rank == rank):
        return world_size
    raise JobStartError(
        "it is not known how many ranks this host runs; set SLURM_NTASKS_PER_NODE (srun --ntasks-per-node)"
    )


def _slurm_counts(text: str) -> list[int]:
    """``"2(x3),1"`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise JobStartError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}; expected numbers of tasks, such as '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _launched(
    environ: Mapping[str, str],
    *,
    launcher: Launcher,
    rank: int,
    rank_variable: str,
    world_size: int,
    local_rank: int,
    local_size: int,
    job_id: str | None,
) -> LaunchInfo:
    if rank >= world_size:
        raise JobStartError(f"{rank_variable} is {rank}; allowed: 0 to {world_size - 1} in a job of {world_size}")
    if not local_rank < local_size <= world_size:
        raise JobStartError(
            f"rank {rank} is said to be local rank {local_rank} of {local_size} on its host, in a job of {world_size}"
        )
    single_host = local_size == world_size
    host, port = (None, None) if world_size == 1 else _rendezvous(environ, rank, single_host, job_id)
    # After a restart, the store of torchrun's agent still holds what the first attempt wrote.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LaunchInfo(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        rendezvous_host=host,
        rendezvous_port=port,
        single_host=single_host,
        job_id=f"{job_id or f'{host}:{port}'}/{attempt}",
    )


def _rendezvous(environ: Mapping[str, str], rank: int, single_host: bool, job_id: str | None) -> tuple[str, int]:
    host = environ.get("MASTER_ADDR")
    if not host:
        if not single_host:
            raise JobStartError(
                f"rank {rank} does not know where the ranks meet, which are on several hosts: set MASTER_ADDR (the "
                "host of rank 0) and MASTER_PORT (a free port there) on every rank"
            )
        host = LOOPBACK
    if "MASTER_PORT" in environ:
        port = _number(environ, "MASTER_PORT", least=1)
        if port > _MAX_PORT:
            raise JobStartError(f"MASTER_PORT is {port}; allowed: 1 to {_MAX_PORT}")
        return host, port
    if job_id is None:
        raise JobStartError(f"rank {rank} does not know where the ranks meet: set MASTER_PORT on every rank")
    # All ranks find the same port without a word, and jobs side by side most likely different ones.
    digest = hashlib.sha256(job_id.encode()).digest()
    return host, _FIRST_DERIVED_PORT + int.from_bytes(digest[:8], "big") % _NUM_DERIVED_PORTS


def _number(environ: Mapping[str, str], variable: str, *, least: int = 0) -> int:
    text = environ.get(variable)
    if text is None:
        raise JobStartError(f"the environment variable {variable} is missing, while others of its launcher are set")
    if not re.fullmatch(r"\d+", text.strip(), re.ASCII) or int(text) < least:
        raise JobStartError(f"the environment variable {variable} is {text!r}; allowed: an integer of {least} or more")
    return int(text)
