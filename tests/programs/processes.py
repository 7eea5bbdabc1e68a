"""Runs programs whose ranks are processes of their own, over real connections."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import shardwright.errors
import torch

from tests.jobs.ranks import forked_ranks
from tests.programs.outcome import Left, Outcome, of_replicas
from tests.programs.program import Program
from tests.programs.running import SECONDS


class RankError(Exception):
    """A rank ended in a way that is no exception of the library."""


def run_in_processes(program: Program) -> tuple[list[Outcome], Counter[str]]:
    """Run a program as a job of processes; the outcome of each replica, and how many requests of each kind were sent.

    Raises:
        ShardwrightError: What a rank raised, the one that it arose on first.
        TimeoutError: A rank hangs.
        RankError: A rank crashed, or raised something else.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-program-") as folder:
        given = Path(folder) / "program.json"
        given.write_text(json.dumps(dataclasses.asdict(program)))
        left: list[Left] = []
        for leg in range(len(program.legs())):
            new = _run_job(program, given, leg)
            for earlier, later in zip(left, new, strict=bool(leg)):
                earlier.extend(later)
            left = left or new
    sent: Counter[str] = Counter()
    for one in left:
        sent.update(one.sent)
    return of_replicas(left), sent


def _run_job(program: Program, given: Path, leg: int) -> list[Left]:
    """Run one of its jobs; what it left on each rank."""
    outputs = given.with_name("output")
    number = program.ranks * program.replicas
    with outputs.open("w") as output:
        command = ["-m", "tests.programs.rank", given, str(leg)]
        ranks = forked_ranks(command, number, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + SECONDS
        try:
            codes = [rank.wait(max(deadline - time.monotonic(), 0.01)) for rank in ranks]
        except subprocess.TimeoutExpired:
            text = outputs.read_text()[-2000:]
            raise TimeoutError(f"a rank did not come to an end within {SECONDS:.0f} seconds: {text}") from None
        finally:
            for rank in ranks:
                rank.kill()
    results = [_result(given.with_name(f"rank{rank}.{leg}.pt")) for rank in range(number)]
    written = outputs.read_text()
    failed = [result for result in results if not isinstance(result, Left)]
    for result in sorted(failed, key=_is_of_another):
        raise _error(result, codes, written)
    if any(codes):
        raise RankError(f"the ranks ended with {codes}: {written[-2000:]}")
    return [result for result in results if isinstance(result, Left)]


def _is_of_another(result: dict[str, Any] | None) -> bool:
    """Whether a rank failed since another one did."""
    return result is not None and result["type"] in ("RemoteError", "PeerLostError")


def _result(path: Path) -> Any:
    with torch.serialization.safe_globals([Left]):
        return torch.load(path, weights_only=True) if path.exists() else None


def _error(result: dict[str, Any] | None, codes: list[int], written: str) -> Exception:
    if result is None:
        return RankError(f"the ranks ended with {codes}: {written[-2000:]}")
    kind = getattr(shardwright.errors, result["kind"], None)
    if kind is None or issubclass(kind, shardwright.errors.RemoteError):
        return RankError(f"{result['kind']}: {result['text']}\n{result['traceback'][-1500:]}")
    error: Exception = kind(result["text"])
    return error
