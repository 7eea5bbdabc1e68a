"""Jobs whose ranks run a list of cases, one after another."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .ranks import outputs_of_ranks

_ALL_HOLD = "all cases hold"


def run_in_job(program: str, ranks: int, cases: Sequence[dict[str, Any]]) -> None:
    """Run cases in one job of ranks that execute a module, which calls :func:`run_listed`."""
    outputs = outputs_of_ranks("-m", program, json.dumps(cases), ranks=ranks)
    assert all(_ALL_HOLD in output for output in outputs)


def module_with(name: str, modules: Sequence[ModuleType]) -> ModuleType:
    """The module that has a function of this name."""
    return next(module for module in modules if hasattr(module, name))


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
