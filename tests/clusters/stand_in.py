"""Stands in for the programs of a cluster that the recipes call: `srun`, `scontrol` and `mpirun`, by their names.

What they pretend is a JSON object in the variable STAND_IN: ``hosts``, the addresses of the hosts; ``tasks``, how many
ranks each runs; ``prefixes``, what to put before a command to run it on each.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_POLL_SECONDS = 0.05


def run_all(command: list[str], environment: Callable[[int, int, int], dict[str, str]]) -> int:
    """Run a command once for each rank, and end all others once one has failed.

    Args:
        command: What each runs.
        environment: Its variables, by rank, host and rank on that host.
    """
    given = json.loads(os.environ["STAND_IN"])
    places = [(host, local) for host, count in enumerate(given["tasks"]) for local in range(count)]
    ranks = [
        subprocess.Popen([*given["prefixes"][host], *command], env=environment(rank, host, local))
        for rank, (host, local) in enumerate(places)
    ]
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(codes):
            for one in ranks:
                one.terminate()
        time.sleep(_POLL_SECONDS)
    return max(abs(code or 0) for code in codes)


def scontrol(words: list[str]) -> int:
    """`scontrol show hostnames LIST`."""
    assert words == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    print(*json.loads(os.environ["STAND_IN"])["hosts"], sep="\n")
    return 0


def srun(words: list[str]) -> int:
    """Run tasks with the variables that srun sets."""
    assert words[0] == "--kill-on-bad-exit=1"
    tasks = json.loads(os.environ["STAND_IN"])["tasks"]
    # Since Slurm 22.05, srun does not take the number of processors of a task from sbatch's variable.
    assert os.environ["SRUN_CPUS_PER_TASK"] == os.environ["SLURM_CPUS_PER_TASK"]

    def environment(rank: int, host: int, local: int) -> dict[str, str]:
        own = {
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": local,
            "SLURM_NODEID": host,
            "SLURM_NTASKS": sum(tasks),
            "SLURM_STEP_NUM_TASKS": sum(tasks),
            "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)),
            "SLURM_STEP_ID": 0,
        }
        return {**os.environ, **{name: str(value) for name, value in own.items()}}

    return run_all(words[1:], environment)


def mpirun(words: list[str]) -> int:
    """Run as many ranks as the hostfile has slots, on one host, with no more variables than other hosts would get."""
    variables: list[str] = []
    slots = 0
    while words[0].startswith("-"):
        option, value, *words = words
        if option == "-x":
            variables.append(value)
        elif option == "--hostfile":
            slots = sum(map(int, re.findall(r"^\S+ slots=(\d+)$", Path(value).read_text(), re.MULTILINE)))
        else:
            assert (option, value) == ("--bind-to", "none")
    assert os.environ["SHARDWRIGHT_SECRET"] not in " ".join(sys.argv)
    has = [name for name in ("PATH", "PYTHONPATH") if name in os.environ]
    kept = {name: os.environ[name] for name in (*variables, *has)}

    def environment(rank: int, host: int, local: int) -> dict[str, str]:
        own = {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(slots),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(slots),
            "PMIX_NAMESPACE": f"stand-in-{os.getpid()}",
        }
        return {**kept, **own}

    return run_all(words, environment)


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol, "mpirun": mpirun}[Path(sys.argv[1]).name](sys.argv[2:]))
