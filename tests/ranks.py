"""Scripts of tests that run as the ranks of a job, each in a process of its own."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.failures.job import free_port, torchrun_environment


def outputs_of_ranks(script: Path, *arguments: str, ranks: int = 2, seconds: float = 110) -> list[str]:
    """What each rank wrote to standard output; a rank that fails fails the test with what it said."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **torchrun_environment(rank, ranks, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        with ThreadPoolExecutor(ranks) as readers:  # all at once: a rank whose pipe is full would stop the others too
            written = list(readers.map(lambda process: process.communicate(timeout=seconds), processes))
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (_, errors)) in enumerate(zip(processes, written, strict=True)):
        assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{errors[-4000:]}"
    return [output for output, _ in written]
