"""Ranks do not outlive the process that started them, however it ends, and neither does what they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shardwright import _core
from shardwright.errors import JobStartError
from shardwright.launch import LAUNCHER, end_with_launcher

from tests.jobs.patience import HANG_SECONDS
from tests.notebook.killed import Starter


def test_ranks_of_a_killed_kernel_and_of_a_killed_launcher_end_with_what_they_have_started(tmp_path: Path) -> None:
    starters = [Starter(name, tmp_path / name) for name in ("kernel", "launcher")]
    left = []
    try:
        for starter in starters:
            left += [(starter.name, pid) for pid in starter.kill()]
    finally:
        for starter in starters:
            starter.process.kill()
        for _, pid in left:
            os.kill(pid, signal.SIGKILL)
    assert left == []


def test_a_process_ends_with_another_that_is_stopped_killed_and_a_zombie() -> None:
    """The other is not its parent, and is waited for by nobody: a zombie has ended."""
    other = subprocess.Popen(["sleep", "1000"])
    ends = f"from shardwright import _core; _core.end_with({other.pid})"
    code = f"{ends}; print('.', flush=True); __import__('time').sleep(1000)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    watching = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    try:
        assert watching.stdout is not None
        assert watching.stdout.read(2) == b".\n"
        other.send_signal(signal.SIGSTOP)
        assert watching.poll() is None
        other.kill()
        assert watching.wait(HANG_SECONDS) == -signal.SIGKILL
    finally:
        for process in (other, watching):
            process.kill()
            process.wait()
        watching.stdout.close() if watching.stdout else None


@pytest.mark.parametrize("given", ["x", "-1", "1.5", str(2**40), "\udcff"])
def test_a_launcher_that_is_no_process_is_refused(given: str) -> None:
    with pytest.raises(JobStartError, match=r"allowed: the number of a process"):
        end_with_launcher({LAUNCHER: given})


def test_a_launcher_that_has_ended_is_named() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(JobStartError, match=rf"the launcher of this rank, process {ended.pid}, has ended"):
        end_with_launcher({LAUNCHER: str(ended.pid)})
    with pytest.raises(OSError, match="No such process"):
        _core.end_with(ended.pid)
    end_with_launcher({})
