"""Jobs whose ranks run a list of cases, one after another."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import shardwright as smp

from .ranks import outputs_of_ranks

_ALL_HOLD = "all cases hold"
#: How long a rank that failed lets the others hear of it and write their rows.
GRACE_SECONDS = 3.0
_Case = TypeVar("_Case")


def run_in_job(program: str, ranks: int, cases: Sequence[dict[str, Any]]) -> None:
    """Run cases in one job of ranks that execute a module, which calls :func:`run_listed`."""
    outputs = outputs_of_ranks("-m", program, json.dumps(cases), ranks=ranks)
    assert all(_ALL_HOLD in output for output in outputs)


def module_with(name: str, modules: Sequence[ModuleType]) -> ModuleType:
    """The module that has a function of this name."""
    return next(module for module in modules if hasattr(module, name))


def write_rows(run: Callable[[_Case], dict[str, Any]], cases: Iterable[_Case], seconds: float) -> int:
    """Run cases, and write a row for each to this rank's file in the folder that is the command line's third argument.

    Args:
        run: Runs one, and returns its row.
        cases: The cases.
        seconds: The most that one may take; the process ends then.

    Returns:
        The exit code. A case that raised is the last one, since it may have left ranks apart.
    """
    with (Path(sys.argv[3]) / f"{os.environ['RANK']}.jsonl").open("a") as rows:
        for case in cases:
            faulthandler.dump_traceback_later(seconds, exit=True)
            row = run(case)
            print(json.dumps(row), file=rows, flush=True)
            if "error" in row:
                time.sleep(GRACE_SECONDS)
                return 1
            smp.shutdown()
            faulthandler.cancel_dump_traceback_later()
    return 0


def run_listed(run: Callable[[dict[str, Any]], None]) -> None:
    """Run the cases that the command line lists, and say at the end that all hold; one that fails is named."""
    for case in json.loads(sys.argv[1]):
        try:
            run(case)
        except BaseException:
            sys.stderr.write(f"case {json.dumps(case)}\n")
            traceback.print_exc()
            sys.stderr.flush()
            raise
    sys.stdout.write(f"{_ALL_HOLD}\n")
