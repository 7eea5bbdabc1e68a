"""The ranks of a step: processes of its own with what torchrun sets, on the step's device."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.jobs.ports import next_port
from tools.gpu_day import processes, stacks
from tools.gpu_day.options import Options, add_arguments, options_of

#: What a rank runs: a function of a module, which returns figures.
RankFunction = Callable[[Options], dict[str, Any]]
#: How long the other ranks may take to end once one has failed.
GRACE_SECONDS = 15.0
_SHOWN_CHARACTERS = 1_500


class RanksError(Exception):
    """Ranks failed, or did not end in time."""


@dataclass
class RankEnded:
    """What a rank came to.

    Attributes:
        code: Its exit code, negative for a signal.
        result: What its function returned; None if it did not.
        log: The file with all that it wrote.
    """

    code: int
    result: dict[str, Any] | None
    log: Path

    def said(self) -> str:
        """The end of what it wrote."""
        return self.log.read_text(errors="replace")[-_SHOWN_CHARACTERS:]


def run_ranks(
    function: RankFunction,
    options: Options,
    ranks: int = 2,
    *,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    grace: float = GRACE_SECONDS,
    watch: Callable[[list[int]], None] | None = None,
) -> list[RankEnded]:
    """Run a function as the ranks of a job to their end.

    Args:
        function: A function of a module; it finds ``RANK`` and ``WORLD_SIZE`` in its environment. On CUDA, rank r's
            current device is r modulo the number of devices.
        options: What it is given.
        ranks: How many processes run it.
        seconds: How long they may take, times the options' patience; whatever runs then is killed, after its stacks
            were written to the step's file.
        environment: Variables that they have besides.
        grace: How long the others may run on once one has failed.
        watch: Called again and again with the process ids while they run.

    Returns:
        Each rank's end, rank 0 first.
    """
    job = f"{function.__module__.rpartition('.')[2]}_{function.__name__}_{time.monotonic_ns() % 1_000_000}"
    port, started = next_port(), []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        own |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        result, log = options.folder / f"{job}.{rank}.json", options.folder / f"{job}.{rank}.log"
        module = [__name__, f"{function.__module__}:{function.__name__}", str(result), *options.arguments()]
        pid = processes.start(
            lambda result=result: _run(function, options, result),  # type: ignore[misc]
            module, {**own, **(environment or {})}, log, log, False,
        )  # fmt: skip
        started.append((pid, result, log))
    codes = _wait([pid for pid, _, _ in started], seconds * options.patience, grace * options.patience, watch)
    ended = []
    for (_, result, log), code in zip(started, codes, strict=True):
        found = json.loads(result.read_text()) if result.exists() else None
        ended.append(RankEnded(code, found, log))
    return ended


def results_of_ranks(
    function: RankFunction,
    options: Options,
    ranks: int = 2,
    *,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The same as :func:`run_ranks`; what each rank returned.

    Raises:
        RanksError: A rank failed; with the end of its log.
    """
    ended = run_ranks(function, options, ranks, seconds=seconds, environment=environment)
    failed = [rank for rank, each in enumerate(ended) if each.code or each.result is None]
    if failed:
        raise RanksError(
            "\n".join(f"rank {rank} ended with {ended[rank].code}: {ended[rank].said()}" for rank in failed)
        )
    return [each.result or {} for each in ended]


def _wait(pids: list[int], seconds: float, grace: float, watch: Callable[[list[int]], None] | None) -> list[int]:
    """Wait for all; their exit codes. What runs too long is killed."""
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        if watch is not None:
            watch(pids)
        for pid in pids:
            if pid not in codes and (code := processes.poll(pid)) is not None:
                codes[pid] = code
                if code:
                    deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            left = [pid for pid in pids if pid not in codes]
            if path := os.environ.get(stacks.VARIABLE):
                stacks.dump(left, Path(path), 5.0)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + grace
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _run(function: RankFunction, options: Options, result: Path) -> int:
    """Be a rank; the exit code. An error is raised, as a script raises it."""
    stacks.register()
    if options.device == "cuda" or "torch" in sys.modules:
        import torch

        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a fork has read the variable already
    found = function(options)
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(found, default=str))
    partial.rename(result)
    return 0


def main() -> int:
    """Be a rank that was started afresh."""
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}", description=__doc__)
    parser.add_argument("function", help="MODULE:FUNCTION")
    parser.add_argument("result", type=Path, help="the file for what it returns")
    add_arguments(parser)
    given = parser.parse_args()
    module, _, name = given.function.partition(":")
    return _run(getattr(importlib.import_module(module), name), options_of(given), given.result)


if __name__ == "__main__":
    sys.exit(main())
