"""Attacks on running jobs of two and four ranks: a table, and a last line of JSON.

usage: python -m tests.attack [--count 25] [--seed 0] [--only WORD]

The exit code is 1 when an attack was not survived, a step was not exact, a process of a job on one host listened where
others can call, or a rank's memory grew by 16 MB or more. Attacks from another host need root, for network namespaces;
without it they are left out, and the line before the last says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.hosts.network import missing

from . import acceptors, command_line, folders, members, sieges
from .sieges import Row

MOST_GROWTH_MB = 16.0
LEAST_ATTACKS = 2000
DDP: dict[str, Any] = {"ddp": True}
#: Without torch's own connections, of which a member would have to tell the library's.
FOUR: dict[str, Any] = {"pipeline_parallel_degree": 4, "transport": "tcp"}


def all_rows(count: int, seed: int, only: str) -> Iterator[Row]:
    """Every attack, job by job; of jobs whose name has ``only`` in it."""
    tcp, shared = {"transport": "tcp"}, {"transport": "shared_memory"}
    sealed: dict[str, Any] = {"transport": "tcp", "encrypt": True}
    jobs: list[tuple[str, Callable[[str], Iterator[Row]]]] = [
        ("2 ranks, auto", lambda job: sieges.on_one_host(job, 2, {}, count, seed)),
        ("4 ranks, ddp, auto", lambda job: sieges.on_one_host(job, 4, DDP, count, seed + 1)),
        ("2 ranks, tcp", lambda job: sieges.on_one_host(job, 2, tcp, count, seed + 2)),
        ("2 ranks, encrypted", lambda job: sieges.on_one_host(job, 2, sealed, count, seed + 3)),
        ("2 ranks, shared memory", lambda job: sieges.late_members(job, 2, shared, 2 * count, seed)),
        ("4 ranks, ddp, ucx", lambda job: sieges.late_members(job, 4, {**DDP, "transport": "ucx"}, count, seed)),
        ("2 ranks, starting", lambda job: sieges.while_it_starts(job, {}, 12 * count)),
        ("2 hosts, auto", lambda job: sieges.over_hosts(job, 2, {}, count, seed)),
        ("4 hosts, ddp, encrypted", lambda job: sieges.over_hosts(job, 4, {**DDP, "encrypt": True}, count, seed)),
        ("2 ranks, member, tcp", lambda job: hostile(job, members.over_tcp(tcp, 2, members.frames()))),
        ("2 ranks, member, shared memory", lambda job: hostile(job, members.over_tcp(shared, 2, members.places()))),
        ("4 ranks, member, tcp", lambda job: hostile(job, members.over_tcp(FOUR, 4, members.frames()[:8]))),
        ("2 ranks, member, ucx", lambda job: hostile(job, members.over_ucx(2))),
    ]
    jobs += [
        (
            "a rank that calls",
            lambda job: plain(job, "whoever sits at rank 0's port", acceptors.impostors(8 * count, seed)),
        ),
        (
            "checkpoint folders",
            lambda job: (
                row
                for attack, outcomes in (
                    ("something else in the place of a file", folders.crafted(8 * count, seed)),
                    ("links where a save writes", folders.written_through()),
                )
                for row in plain(job, attack, outcomes)
            ),
        ),
        ("stores", lambda job: plain(job, "a store that answers what it likes", folders.stores())),
        ("the command line", lambda job: plain(job, "bad values at every place", command_line.refusals())),
    ]
    for name, attack in jobs:
        if only in name and ("hosts" not in name or missing() is None):
            yield from attack(name)


def plain(job: str, attack: str, outcomes: Iterator[bool]) -> Iterator[Row]:
    """Attacks beside no job, each of which says whether it succeeded, as a row."""
    all_outcomes = list(outcomes)
    yield Row(job, attack, len(all_outcomes), len(all_outcomes) - sum(all_outcomes))


def hostile(job: str, outcomes: Iterator[members.Outcome]) -> Iterator[Row]:
    """Attacks of members, as rows."""
    for one in outcomes:
        attack = f"a member sends {one.name}"
        yield Row(job, attack, one.attacks, one.survived, one.inexact, 0, one.growth_mb, one.said)


def main() -> int:
    """Run the attacks; the exit code."""
    parser = argparse.ArgumentParser(prog="tests.attack", description=__doc__)
    parser.add_argument("--count", type=int, default=25, help="visits of each kind at each door")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="jobs whose name has this in it")
    given = parser.parse_args()
    began = time.monotonic()
    rows = []
    print(f"{'job':<31} {'attack':<56} {'attacks':>7} {'survived':>8} {'inexact':>7} {'MB':>6}")
    for row in all_rows(given.count, given.seed, given.only):
        rows.append(row)
        numbers = f"{row.attacks:>7} {row.survived:>8} {row.inexact:>7} {row.growth_mb:>6.1f}"
        print(f"{row.job:<31} {row.attack:<56} {numbers} {row.said}", flush=True)
    reason = missing()
    print(f"{time.monotonic() - began:.0f} s" + (f"; nothing from another host: {reason}" if reason else ""))
    total = {
        "attacks": sum(row.attacks for row in rows),
        "survived": sum(row.survived for row in rows),
        "inexact": sum(row.inexact for row in rows),
        "listeners_outside": max((row.outside for row in rows), default=0),
        "max_rss_growth_mb": round(max((row.growth_mb for row in rows), default=0.0), 1),
    }
    print(json.dumps(total))
    fine = (
        total["survived"] == total["attacks"]
        and (bool(given.only) or given.count < parser.get_default("count") or total["attacks"] >= LEAST_ATTACKS)
        and not total["inexact"]
        and not total["listeners_outside"]
        and total["max_rss_growth_mb"] < MOST_GROWTH_MB
    )
    return 0 if fine else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
