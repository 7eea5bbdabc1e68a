"""Whatever the command is given, it ends soon, with one line on the standard error and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.attack.command_line import cases, fault, furnished
from tests.jobs.patience import HANG_SECONDS


def test_every_value_at_every_place_ends_soon_and_in_one_line() -> None:
    """A table over all verbs, their options and their words, with values of wrong types, sizes and encodings.

    Some values for each place; ``make attack`` has all of them.
    """
    with furnished():
        all_cases = list(cases(3))
        # Values that argparse takes apart.
        all_cases += [["run", f"{option}=--", "script.py"] for option in ("--nnodes", "--rdzv-conf", "--role")]
        told = [why for words in all_cases if (why := fault(words)) is not None]
    assert not told, f"{len(told)} of {len(all_cases)}:\n" + "\n".join(told[:40])
    assert len(all_cases) > 150


def started(*words: str, **settings: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-m", "shardwright", *words], stderr=subprocess.PIPE, env=environment, **settings
    )


def test_outputs_that_cannot_be_written_and_ctrl_c_in_the_import_are_one_line() -> None:
    """A full device, a closed pipe, no standard output at all, bytes that are no text, and an interrupt."""
    with furnished():
        _check_processes()


def _check_processes() -> None:
    reading, closed = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full:
        processes = {
            "full device": started("checkpoint", "ls", "checkpoint", stdout=full),
            "full device, help of run": started("run", "--help", stdout=full),
            "closed pipe": started("checkpoint", "ls", "checkpoint", stdout=closed),
            "no output": started("checkpoint", "ls", "checkpoint", preexec_fn=lambda: os.close(1)),
            "bytes": started("checkpoint", "ls", os.fsdecode(b"no\xfftext"), stdout=subprocess.PIPE),
            "interrupt": started("checkpoint", "ls", "checkpoint", stdout=subprocess.PIPE),
        }
    os.close(closed)
    try:
        interrupted = processes["interrupt"]
        deadline = time.monotonic() + HANG_SECONDS
        while b"libtorch_cpu" not in Path(f"/proc/{interrupted.pid}/maps").read_bytes():
            assert time.monotonic() < deadline
            assert interrupted.poll() is None
            time.sleep(0.005)
        interrupted.send_signal(signal.SIGINT)
        for name, process in processes.items():
            _, told = process.communicate(timeout=HANG_SECONDS)
            assert process.returncode not in (0, None), name
            lines = told.decode().splitlines()
            assert len(lines) == 1, f"{name}: {told.decode()}"
            assert lines[0].startswith("shardwright"), name
        assert interrupted.returncode == 130
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
