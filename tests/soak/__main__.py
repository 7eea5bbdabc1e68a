"""Many jobs in the same processes, and many steps of which some fail: whether anything is left behind.

usage: python -m tests.soak [--jobs 200] [--steps 2000] [--killed 10] [--transport NAME]

A table, and a last line of JSON. The exit code is 1 when descriptors, threads or mappings grew between a tenth of a run
and its end, or shared memory did from job to job, when steps left any of the persistent buffer in use, when a job's
runtime was not freed, or when resident memory grew by more than a bar. How much of the buffer has ever been used is no
leak: it depends on whether a rank had already freed one large tensor when the next was sent.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tests.jobs.ranks import outputs_of_ranks
from tests.soak.held import MB, Held, grown
from tests.soak.killed_starters import left_of

TRANSPORTS = ("auto", "tcp")
#: Between a tenth of a run and its end. One large tensor of 10 MB that stays would be more; what Python's allocator and
#: torch's caches add comes to two or three.
MAX_GROWTH_MB = 8.0
#: The first sample of each program that tells something: there was a job of every kind, and large steps of both kinds,
#: so that the shared buffer has been used as far as it will be.
FIRST = {"job_after_job": 12, "failing_steps": 100}
#: How long both ranks may take for all jobs, and for all steps.
LIMIT_SECONDS = 1800.0


class Run(NamedTuple):
    """What one rank held early in a run, and at its end.

    Attributes:
        name: What ran.
        transport: The configuration's key.
        rank: Which rank it is.
        early: After a tenth of the run.
        late: At its end.
        unfreed: Jobs whose runtime was not freed.
        in_one_job: Whether the job goes on from the early sample to the late one.
    """

    name: str
    transport: str
    rank: int
    early: Held
    late: Held
    unfreed: int
    in_one_job: bool

    @property
    def grown(self) -> dict[str, dict[str, int]]:
        """What there is more of at the end, by kind."""
        kinds = ("descriptors", "threads", "maps")
        found = {kind: grown(getattr(self.early, kind), getattr(self.late, kind)) for kind in kinds}
        return {kind: more for kind, more in found.items() if more}

    @property
    def leaked(self) -> dict[str, int]:
        """How many more of each kind there are at the end."""
        return {kind: sum(more.values()) for kind, more in self.grown.items()}

    @property
    def shared_growth_mb(self) -> float:
        """How much shared memory came from job to job; within one job, how much of its buffer stays in use."""
        return self.late.buffer_bytes / MB if self.in_one_job else self.late.shared_mb - self.early.shared_mb

    @property
    def growth_mb(self) -> float:
        """How much resident memory came."""
        return self.late.resident_mb - self.early.resident_mb

    @property
    def is_flat(self) -> bool:
        """Whether nothing leaks."""
        few = self.shared_growth_mb < 1.0 and self.growth_mb < MAX_GROWTH_MB
        return few and not self.late.buffer_bytes and not self.grown and not self.unfreed


def run(name: str, program: str, number: int, transport: str) -> list[Run]:
    """Both ranks of a program.

    Args:
        name: For the table.
        program: The script, by its name in this folder.
        number: How many jobs or steps.
        transport: The configuration's key.
    """
    first = max(number // 10, FIRST[program])
    script = Path(__file__).with_name(f"{program}.py")
    outputs = outputs_of_ranks(script, str(number), transport, seconds=LIMIT_SECONDS)
    runs = []
    for rank, output in enumerate(outputs):
        samples: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert samples[-1]["number"] == number, f"rank {rank} ended after {samples[-1]['number']}"
        early = next(sample for sample in samples if sample["number"] >= first)
        unfreed = sum(not sample.get("runtime_is_gone", True) for sample in samples)
        held = Held.of(early["held"]), Held.of(samples[-1]["held"])
        runs.append(Run(name, transport, rank, *held, unfreed, program == "failing_steps"))
    return runs


def show(runs: list[Run]) -> None:
    """Print a line for each rank of each run, and below it what leaks."""
    table = Table("run", "transport", "rank", "descriptors", "threads", "maps", "shared MB", "resident MB", "flat")
    for one in runs:
        kinds = ("descriptors", "threads", "maps")
        totals = [[sum(getattr(held, kind).values()) for held in (one.early, one.late)] for kind in kinds]
        table.add_row(
            one.name,
            one.transport,
            str(one.rank),
            *(f"{early} to {late}" for early, late in totals),
            f"{one.early.shared_mb:.1f} to {one.late.shared_mb:.1f}",
            f"{one.early.resident_mb:.0f} to {one.late.resident_mb:.0f}",
            "yes" if one.is_flat else "no",
        )
    Console(width=120).print(table)
    for one in runs:
        if one.grown or one.unfreed:
            print(f"{one.name}, {one.transport}, rank {one.rank}: {one.grown}, {one.unfreed} runtimes not freed")


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=200, help="how many jobs each process goes through")
    parser.add_argument("--steps", type=int, default=2000, help="how many steps, of which every tenth fails")
    parser.add_argument("--killed", type=int, default=10, help="how many notebooks, and launchers, are killed")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="both by default")
    given = parser.parse_args()
    runs: list[Run] = []
    for transport in given.transport or TRANSPORTS:
        for name, program, number in (
            (f"{given.jobs} jobs", "job_after_job", given.jobs),
            (f"{given.steps} steps", "failing_steps", given.steps),
        ):
            print(f"{name} over {transport}", file=sys.stderr)
            runs += run(name, program, number, transport)
    show(runs)
    print(f"{given.killed} notebooks and launchers that are killed", file=sys.stderr)
    left = left_of(given.killed)

    def most(kind: str) -> int:
        return max(one.leaked.get(kind, 0) for one in runs)

    summary = {
        "jobs": given.jobs,
        "steps": given.steps,
        "leaked_fds": most("descriptors"),
        "leaked_threads": most("threads"),
        "leaked_maps": most("maps"),
        "shared_growth_mb": round(max(one.shared_growth_mb for one in runs), 1),
        "rss_growth_mb": round(max(one.growth_mb for one in runs), 1),
        "killed": {name: given.killed for name in left},
        "left_of_killed": sum(left.values()),
    }
    print(json.dumps(summary), flush=True)
    return 0 if all(one.is_flat for one in runs) and not any(left.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
