"""Runs every parity case and prints a table; see ``--help``."""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .cases import Case, all_cases
from .table import BAR, Outcome, judge, render

ROOT = Path(__file__).resolve().parents[2]
#: A job that has written nothing for this long is ended; ranks end themselves earlier.
SILENT_SECONDS = 300.0
POLL_SECONDS = 0.3
LOG_LINES = 60


class Job:
    """The processes of one topology, running cases in turn."""

    def __init__(self, cases: list[Case], folder: Path) -> None:
        self.cases = cases
        self.folder = folder
        self.log = folder / "log"
        pp, dp = cases[0].topology
        self.world = pp * dp
        (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT / "python"), *filter(None, [environment.get("PYTHONPATH")])]
        )
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.world}"]
        command = ["-m", "tests.parity.rank", str(folder / "cases.json"), str(folder)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, *command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def rows(self) -> list[dict[str, dict[str, Any]]]:
        """Each rank's rows by case."""
        found = []
        for rank in range(self.world):
            path = self.folder / f"{rank}.jsonl"
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            found.append({row["case"]: row for row in map(json.loads, filter(_complete, lines))})
        return found

    def wait(self, progress: Progress, bar: Any) -> None:
        """Wait for the end, showing how many cases are done."""
        seen, last = 0, time.monotonic()
        while self.process.poll() is None:
            done = min(len(rows) for rows in self.rows())
            if done > seen:
                progress.advance(bar, done - seen)
                seen, last = done, time.monotonic()
            if time.monotonic() - last > SILENT_SECONDS:
                self.process.terminate()
                try:
                    self.process.wait(20)
                except subprocess.TimeoutExpired:
                    self.process.kill()
            time.sleep(POLL_SECONDS)
        progress.advance(bar, min(len(rows) for rows in self.rows()) - seen)

    def outcomes(self) -> list[Outcome]:
        """What came of the cases up to the one that ended the job, if one did; at least one."""
        rows = self.rows()
        outcomes: list[Outcome] = []
        for case in self.cases:
            outcome = judge(case, [found.get(case.name) for found in rows])
            outcomes.append(outcome)
            if not all(case.name in found for found in rows):
                outcome.log = "\n".join(self.log.read_text().splitlines()[-LOG_LINES:])
                break
        return outcomes


def _complete(line: str) -> bool:
    return line.endswith("\n")


def run_cases(cases: list[Case], progress: Progress, show_logs: bool) -> list[Outcome]:
    """Run all cases, one job for each topology; a job that fails is started again behind it."""
    outcomes: list[Outcome] = []
    bar = progress.add_task("", total=len(cases))
    for topology, group in itertools.groupby(cases, key=lambda case: case.topology):
        remaining = list(group)
        while remaining:
            progress.update(bar, description=f"pp {topology[0]}, dp {topology[1]}")
            with tempfile.TemporaryDirectory(prefix="parity-") as folder:
                job = Job(remaining, Path(folder))
                try:
                    job.wait(progress, bar)
                finally:
                    if job.process.poll() is None:
                        job.process.terminate()
                        job.process.wait()
                found = job.outcomes()
                if show_logs and any(outcome.failures for outcome in found):
                    progress.console.print(job.log.read_text(), markup=False, highlight=False)
            for outcome in found:
                if outcome.failures:
                    progress.console.print(
                        f"[red]failed[/] {outcome.case.name}: {outcome.failures[0]}", highlight=False
                    )
            outcomes += found
            remaining = remaining[len(found) :]
            progress.update(bar, completed=len(outcomes))
    return outcomes


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="names of cases to run, with * and ?; all by default")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--logs", action="store_true", help="show the whole log of each job with a failed case")
    arguments = parser.parse_args()
    cases = [
        case
        for case in all_cases()
        if not arguments.patterns or any(fnmatch.fnmatch(case.name, pattern) for pattern in arguments.patterns)
    ]
    if arguments.list or not cases:
        print("\n".join(case.name for case in cases) or "no case has such a name; see --list")
        return 0 if cases else 2
    columns = (
        TextColumn("parity {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the job is ended on the way out
    with Progress(*columns, console=Console(stderr=True)) as progress:
        outcomes = run_cases(cases, progress, arguments.logs)
    print(render(outcomes))
    failed = [outcome for outcome in outcomes if outcome.failures]
    for outcome in failed:
        print(f"\n{outcome.case.name}:", *outcome.failures, sep="\n  ")
        if outcome.log:
            print(outcome.log)
    summary = {
        "cases": len(outcomes),
        "failed": len(failed),
        "worst_rel_error": max(outcome.worst for outcome in outcomes),
        "min_remote_requests": min(outcome.forward + outcome.backward for outcome in outcomes),
    }
    print(json.dumps(summary), flush=True)
    return 1 if failed or summary["worst_rel_error"] >= BAR else 0


if __name__ == "__main__":
    sys.exit(main())
