"""``python -m shardwright.verify``: starts a job on this machine, verifies one step, and prints the table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from torch._C._distributed_c10d import TCPStore

from shardwright.launch import LAUNCHER
from shardwright.rendezvous import loopback_store

EXACT, DIFFERENT, MISUSE = 0, 1, 2
_POLL_SECONDS = 0.1
#: How long the other ranks may take to exit after one has failed.
_END_SECONDS = 15.0
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_EPILOG = """
build() takes no arguments and returns (model, step_function, batch): a torch.nn.Module, a function decorated with
smp.step, and the arguments that follow the model, as a tuple or one tensor. It may return a fourth value, a dict of
arguments of smp.DistributedModel. It runs on every rank, after smp.init and after seeding: smp.rank() and smp.dp_rank()
are there, for batches that differ between replicas.

The last line of standard output is a JSON object. Exit status: 0 if exact, 1 if something departs, 2 on misuse or if
the step could not be run.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m shardwright.verify",
        description="Verify that a distributed step equals the same step in one process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("target", help="FILE.py:FUNCTION that builds the model, the step function and the batch")
    made.add_argument("--pp", type=_positive, default=2, help="pipeline-parallel degree (default: 2)")
    made.add_argument("--dp", type=_positive, default=1, help="data-parallel degree (default: 1)")
    made.add_argument("--microbatches", type=_positive, default=4, help="microbatches (default: 4)")
    made.add_argument("--dtype", choices=_DTYPES, default="float64", help="of model and batch (default: float64)")
    made.add_argument("--pipeline", choices=("interleaved", "simple"), default="interleaved", help="the schedule")
    made.add_argument("--seed", type=int, default=0, help="of torch, before build() is called (default: 0)")
    made.add_argument("--tolerance", type=float, help="the largest error allowed (default: by dtype)")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds for the whole job (default: 600)")
    made.add_argument("--config", type=json.loads, default={}, help="further configuration keys, as a JSON object")
    return made


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; allowed: 1 or more")
    return number


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    given = parser().parse_args(arguments)  # exits with 2 on misuse
    path, _, function = given.target.rpartition(":")
    if not path or not function.isidentifier() or not Path(path).is_file():
        return _refuse(f"{given.target!r} is not FILE.py:FUNCTION with a file that exists")
    if not isinstance(given.config, dict):
        return _refuse("--config is not a JSON object")
    if given.tolerance is not None and not given.tolerance > 0:
        return _refuse(f"--tolerance is {given.tolerance}; allowed: a positive number")
    with tempfile.TemporaryDirectory(prefix="shardwright-verify-") as folder:
        return _run(given, Path(folder))


def _refuse(why: str) -> int:
    print(f"shardwright.verify: {why}", file=sys.stderr)
    print(json.dumps({"exact": False, "error": why}), flush=True)
    return MISUSE


def _run(given: argparse.Namespace, folder: Path) -> int:
    result, options = folder / "report.json", folder / "options.json"
    options.write_text(json.dumps({**vars(given), "result": str(result)}))
    # The ranks rendezvous at this store, so that no port has to be free later.
    store = loopback_store(0, given.timeout)
    processes = _start(given.pp * given.dp, options, folder, store)
    try:
        failed = _wait(processes, time.monotonic() + given.timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not result.exists():
        shown = failed if failed is not None else 0
        log = (folder / f"{shown}.log").read_text(errors="replace")
        print(log[-8000:], file=sys.stderr)
        reason = "took longer than --timeout" if failed is None else f"ended with {processes[failed].returncode}"
        return _refuse(f"rank {shown} {reason}; what it said last is above")
    outcome = json.loads(result.read_text())
    print(outcome.pop("text"))
    print(json.dumps(outcome), flush=True)
    return EXACT if outcome["exact"] else DIFFERENT


def _start(world: int, options: Path, folder: Path, store: TCPStore) -> list[subprocess.Popen[bytes]]:
    threads = str(max(1, (os.cpu_count() or 1) // world))
    processes = []
    for rank in range(world):
        environment = {
            "OMP_NUM_THREADS": threads,
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            LAUNCHER: str(os.getpid()),
        }
        command = [sys.executable, "-m", "shardwright.verify.rank", str(options)]
        with (folder / f"{rank}.log").open("wb") as log:
            processes.append(_start_rank(command, environment, log))
    return processes


def _start_rank(command: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0)


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """Wait for all processes; return the first rank that failed, or None if none failed before the deadline."""
    failed = None
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if failed is None and any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            deadline = min(deadline, time.monotonic() + _END_SECONDS)
        if all(code is not None for code in codes):
            break
        time.sleep(_POLL_SECONDS)
    return failed
