"""Looks in jobs for the symbols of the table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.compat.interface import OLD_VERSIONS, SYMBOLS, Symbol
from tests.jobs.forked import ROOT
from tests.jobs.ranks import outputs_of_ranks


@dataclass(frozen=True)
class Job:
    """A job in which some attributes exist: its number of ranks, and its configuration."""

    ranks: int
    config: Mapping[str, Any]


_SHARDING = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
JOBS = {"plain": Job(1, {}), "float16": Job(1, {"fp16": True}), "sharded": Job(2, _SHARDING)}


def refused_symbols() -> list[Symbol]:
    """Return the symbols that are not here, for a reason."""
    return [symbol for symbol in (*SYMBOLS, *OLD_VERSIONS) if symbol.refused]


def wrong_symbols() -> list[str]:
    """Return what is wrong with the symbols that should be here, a line for each."""
    found: set[str] = set()
    looked_at: set[str] = set()
    for name, job in JOBS.items():
        out, *_ = outputs_of_ranks("-m", "tests.compat.found", name, ranks=job.ranks, folder=ROOT)
        report = json.loads(out.splitlines()[-1])
        found.update(report["problems"])
        looked_at.update(report["looked_at"])
    expected = {symbol.name for symbol in SYMBOLS if not symbol.refused}
    return sorted([*found, *(f"{name} was not looked at" for name in expected - looked_at)])
