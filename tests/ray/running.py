"""Runs a case in a process of its own, with a limit, and looks at what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

#: Ends a case that stands still: each takes a minute on an idle machine.
LIMIT_SECONDS = 2400.0
#: How long Ray waits for its own processes to start.
_PATIENCE = "600"
#: How long processes of a cluster that was shut down may take to end.
_ENDING_SECONDS = 120.0
#: In the environment of each process of a case, by which it is known.
_MARK = "SHARDWRIGHT_TESTS_RAY_CASE"
_ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        state: ``passed``, ``failed`` or ``hung``.
        said: What the case tells, or its error.
        seconds: How long it took.
        output: What its processes have written.
        left: Processes and files that are still there.
    """

    state: str
    said: str
    seconds: float
    output: str
    left: list[str]


def run(name: str) -> Outcome:
    """Run a case."""
    mark, shared = uuid.uuid4().hex, set(os.listdir("/dev/shm"))
    # Ray's sockets are in there, whose paths may have no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as scratch:
        folder = Path(scratch)
        (folder / "tmp").mkdir()
        environment = {
            **os.environ,
            _MARK: mark,
            "TMPDIR": str(folder / "tmp"),
            "HOME": str(folder / "home"),  # where Ray puts the token of a cluster
            "PYTHONPATH": os.pathsep.join([str(_ROOT / "python"), str(_ROOT)]),
            "RAY_USAGE_STATS_ENABLED": "0",
            # What costs processes of its own and is not looked at here.
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
            "RAY_TRAIN_METRICS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_metrics_collection": "0",
            "RAY_raylet_start_wait_time_s": "60",
            "RAY_worker_register_timeout_seconds": _PATIENCE,
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": _PATIENCE,
            "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": _PATIENCE,
            # A machine with other things to do may leave ranks without a processor for long.
            "SM_HP_MP_PARAMETERS": json.dumps({"liveness_timeout_seconds": 300.0, "connect_timeout_seconds": 600.0}),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        (folder / "home").mkdir()
        began = time.monotonic()
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.ray.case", name, str(folder)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=_ROOT,
                start_new_session=True,
            )
            hung = False
            try:
                process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                hung = True
                process.kill()
                process.wait()
        seconds = time.monotonic() - began
        left = [] if hung else _processes_after(mark)
        _end(mark)
        if not hung:
            left += [f"file {each}" for each in sorted(os.listdir(folder / "tmp"))]
            left += [f"shared memory {each}" for each in sorted(set(os.listdir("/dev/shm")) - shared)]
        said = {"passed": False, "said": f"the driver ended with {process.returncode}"}
        with contextlib.suppress(FileNotFoundError):
            said = json.loads((folder / "outcome.json").read_text())
        state = "hung" if hung else "passed" if said["passed"] else "failed"
        return Outcome(state, str(said["said"]), seconds, (folder / "output").read_text(errors="replace"), left)


def _processes(mark: str) -> dict[int, str]:
    """The processes of a case, with their commands."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (each / "environ").read_bytes():
                found[int(each.name)] = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def _processes_after(mark: str) -> list[str]:
    """The processes that do not end by themselves."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while (left := _processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [f"process {number}: {command[:120]}" for number, command in left.items()]


def _end(mark: str) -> None:
    """Kill what is left, so that the next case does not meet it."""
    for number in _processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
