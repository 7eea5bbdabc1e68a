"""Cases of a step, for ranks: one of them fails."""

from __future__ import annotations

import os
from typing import Any

from tools.gpu_day.cases import run_listed
from tools.gpu_day.options import Options

CASES: dict[str, dict[str, Any]] = {name: {"name": name} for name in ("first", "fails", "dies", "last")}


def on_rank(options: Options) -> dict[str, Any]:
    """Be a rank."""
    return run_listed(options, case, CASES)


def case(options: Options, name: str) -> dict[str, Any]:
    """Fail on rank 1, where the name says so."""
    rank = int(os.environ["RANK"])
    if rank == 1 and name == "fails":
        raise ValueError("as planned")
    if rank == 1 and name == "dies":
        os._exit(3)
    return {"rank": rank, "pid": os.getpid(), "device": options.device}
