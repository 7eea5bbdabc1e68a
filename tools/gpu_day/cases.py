"""Runs a step's cases on ranks that share the device, one after another in as few jobs as possible."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gpu_day.options import Options
from tools.gpu_day.ranks import RankFunction, run_ranks

#: For a rank: the names of its cases, and the file to which it writes what they gave, as JSON.
_CASES, _ROWS = "SHARDWRIGHT_GPU_DAY_CASES", "SHARDWRIGHT_GPU_DAY_ROWS"
#: Of an error, as many characters as a result line takes; the log has all.
_TEXT = 1_500
#: cuBLAS gives the same numbers for the same call only with a workspace of its own for each stream.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run_cases(
    function: RankFunction, cases: Mapping[str, Any], options: Options, *, seconds: float, num_ranks: int = 2
) -> Iterator[tuple[str, list[Any], str]]:
    """Run cases on the ranks of a job.

    A case that fails ends its job, since it may have left the ranks apart; the rest runs in a new one.

    Args:
        function: What a rank runs, which calls :func:`run_listed`.
        cases: By name.
        options: Of the step.
        seconds: The most that all cases may take.
        num_ranks: How many ranks.

    Yields:
        The name; what each rank returned, rank 0 first; and if the case failed, how.
    """
    deadline = time.monotonic() + seconds
    left, number = list(cases), 0
    while left:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            for name in left:
                yield name, [], "not run: no time was left"
            return
        number += 1
        rows = options.folder / f"{function.__module__.rpartition('.')[2]}-{number}"
        environment = {**_ENVIRONMENT, _CASES: json.dumps(left), _ROWS: str(rows)}
        ended = run_ranks(function, options, num_ranks, seconds=remaining, environment=environment)
        by_rank = [_read(_rows_of(str(rows), rank)) for rank in range(num_ranks)]
        while left:
            name = left.pop(0)
            found = [rows_of_rank.get(name, {}) for rows_of_rank in by_rank]
            if all("result" in one for one in found):
                yield name, [one["result"] for one in found], ""
                continue
            errors = [
                f"rank {rank}: {one.get('error') or f'ended with {end.code}: {end.said()}'}"
                for rank, (one, end) in enumerate(zip(found, ended, strict=True))
                if "result" not in one
            ]
            yield name, [], "; ".join(errors)
            break


def run_listed(options: Options, run: Callable[..., Any], cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Be a rank: run the cases that :func:`run_cases` names, up to one that fails.

    Args:
        options: Of the step.
        run: Gets the options and a case's arguments.
        cases: Arguments by the name of the case.
    """
    names = json.loads(os.environ[_CASES])
    with _rows_of(os.environ[_ROWS], int(os.environ["RANK"])).open("a") as file:
        for name in names:
            try:
                row = {"result": run(options, **cases[name])}
            except Exception as error:
                traceback.print_exc()
                row = {"error": "".join(traceback.format_exception_only(error)).strip()[-_TEXT:]}
            print(json.dumps({"name": name, **row}, default=str), file=file, flush=True)
            if "error" in row:
                break
    return {}


def _rows_of(rows: str, rank: int) -> Path:
    return Path(f"{rows}.{rank}.jsonl")


def _read(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}
