"""A collective that will never end must not bring the process down when Python ends."""

import os
import subprocess
import sys
from pathlib import Path

from tests.ranks import free_port, torchrun_environment

PROGRAM = Path(__file__).with_name("unfinished_work.py")


def test_a_work_under_way_is_kept_when_python_ends() -> None:
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **torchrun_environment(rank, 2, port)},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=100)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 9], errors
