"""Jobs of ranks that run cases, and what came of them. Needs no torch."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.jobs.group import Group
from tests.jobs.patience import HANG_SECONDS

from .cases import Case
from .table import Outcome, first_failure, judge

ROOT = Path(__file__).resolve().parents[2]
#: A job that has written nothing for this long is ended; ranks end themselves earlier.
SILENT_SECONDS = 1.5 * HANG_SECONDS
POLL_SECONDS = 0.3
LOG_LINES = 60
#: Makes an outcome of the rows of a case, one of each rank; None where a rank has none.
Judge = Callable[[Case, list[dict[str, Any] | None]], Outcome]


class Job:
    """The processes of one topology, running cases in turn."""

    def __init__(self, arguments: Sequence[str], cases: Sequence[Case], folder: Path, judged: Judge) -> None:
        self.cases = cases
        self.judged = judged
        self.folder = folder
        self.log = folder / "log"
        pp, dp = cases[0].topology
        self.world = pp * dp
        (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
        command = ["-m", *arguments, str(folder / "cases.json"), str(folder)]
        with self.log.open("w") as log:
            self.process = Group(command, self.world, output=log, folder=ROOT)

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
                    self.process.wait(HANG_SECONDS)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait(HANG_SECONDS)
            time.sleep(POLL_SECONDS)
        progress.advance(bar, min(len(rows) for rows in self.rows()) - seen)

    def outcomes(self) -> list[Outcome]:
        """What came of the cases up to the one that ended the job, if one did; at least one."""
        rows = self.rows()
        outcomes: list[Outcome] = []
        for case in self.cases:
            outcome = self.judged(case, [found.get(case.name) for found in rows])
            outcomes.append(outcome)
            if not all(case.name in found for found in rows):
                outcome.log = "\n".join(self.log.read_text().splitlines()[-LOG_LINES:])
                break
        return outcomes


def _complete(line: str) -> bool:
    return line.endswith("\n")


def progress_bar(title: str) -> Progress:
    """A progress bar on the standard error stream."""
    return Progress(
        TextColumn(f"{title} {{task.description}}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip


def run_cases(
    problems: str,
    cases: Sequence[Case],
    progress: Progress,
    *,
    program: str = "tests.parity.rank",
    judged: Judge = judge,
    complaint: Callable[[Outcome], str | None] = first_failure,
    show_logs: bool = False,
) -> list[Outcome]:
    """Run all cases, one job for each topology; a job that fails is started again behind it.

    Args:
        problems: The module whose ``PROBLEMS`` the cases name.
        cases: What to run, those of one topology together.
        progress: Where to show how far it is.
        program: The module that each rank runs.
        judged: Makes an outcome of the ranks' rows.
        complaint: What is to be shown of an outcome at once.
        show_logs: Show the whole log of each job with an outcome to complain of.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the job is ended on the way out
    outcomes: list[Outcome] = []
    bar = progress.add_task("", total=len(cases))
    for topology, group in itertools.groupby(cases, key=lambda case: case.topology):
        remaining = list(group)
        while remaining:
            progress.update(bar, description=f"pp {topology[0]}, dp {topology[1]}")
            with tempfile.TemporaryDirectory(prefix="parity-") as folder:
                job = Job([program, problems], remaining, Path(folder), judged)
                try:
                    job.wait(progress, bar)
                finally:
                    if job.process.poll() is None:
                        job.process.kill()
                        job.process.wait(HANG_SECONDS)
                found = job.outcomes()
                complaints = {outcome.case.name: text for outcome in found if (text := complaint(outcome))}
                if show_logs and complaints:
                    progress.console.print(job.log.read_text(), markup=False, highlight=False)
            for name, text in complaints.items():
                progress.console.print(f"failed {name}: {text}", markup=False, highlight=False)
            outcomes += found
            remaining = remaining[len(found) :]
            progress.update(bar, completed=len(outcomes))
    return outcomes
