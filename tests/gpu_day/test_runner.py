"""The runner of the GPU's day: no step, whatever it does, keeps another from running or the run from ending in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.forked import ROOT
from tests.jobs.patience import HANG_SECONDS, slowdown
from tools.gpu_day.output import MAX_FILES, Output
from tools.gpu_day.plan import PLAN

PLANTED = "tests.gpu_day.plan"


def run(
    folder: Path, *arguments: str, **environment: str
) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]], str]:
    """Run the planted plan; the exit code, the last line, the results by step, and the logs."""
    command = [sys.executable, "-m", "tools.gpu_day", "--device", "cpu", "--plan", PLANTED, "--folder", str(folder)]
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT)])
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.stdout, done.stderr
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    logs = "".join(path.read_text() for path in sorted(folder.glob("log-*.txt")))
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), {r["step"]: r for r in rows if "step" in r}, logs


@pytest.fixture(scope="module", params=["forked", "fresh"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A whole run, whose steps and ranks are forks, or fresh processes."""
    fresh = "1" if request.param == "fresh" else ""
    folder = tmp_path_factory.mktemp("out")
    return *run(folder, "--tiny", SHARDWRIGHT_GPU_DAY_FRESH=fresh), folder


def test_every_step_has_a_result_and_none_stops_the_next(whole: Any) -> None:
    code, last, rows, _, _ = whole
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "raises": "failed",
        "hangs": "deadline",
        "dies": "failed",
        "says_nothing": "failed",
        "missing": "failed",
        "leaves_a_process": "passed",
        "fails": "failed",
        "writes_much": "passed",
        "passes": "passed",
    }
    assert (last["steps"], last["failed"]) == (9, 6)
    assert code == 1
    assert rows["raises"]["error"] == "ValueError: planted"
    assert rows["dies"]["error"] == "it left no result, and ended with -9"
    assert rows["says_nothing"]["error"] == "it left no result, and ended with 0"
    assert rows["fails"]["bars"] == {"rate": 0.4}
    ranks = [{"rank": rank, "of": 2, "device": "cpu"} for rank in range(2)]
    assert rows["passes"]["ranks"] == ranks
    assert rows["passes"]["tiny"] is True


def test_before_a_deadline_ends_a_step_all_threads_of_all_its_processes_show_their_stacks(whole: Any) -> None:
    _, _, rows, logs, _ = whole
    stacks = logs.partition("======== hangs")[2].partition("======== dies")[0].partition("---- stacks")[2]
    assert stacks.count("in wait_for_good") == 3, "a thread of the step, and one of each rank"
    assert stacks.count("in rank") == 2, "the main threads of both ranks"
    assert "in run_ranks" in stacks, "the main thread of the step"
    assert "sleep 600" in stacks, "a process that cannot be asked is named"
    assert 6 <= rows["hangs"]["seconds"] < 30


def test_nothing_that_a_step_started_outlives_it(whole: Any) -> None:
    _, _, rows, _, _ = whole
    assert rows["leaves_a_process"]["processes_left"] == 1
    assert not Path(f"/proc/{rows['leaves_a_process']['left']}").exists()


def test_logs_are_bounded_and_keep_both_ends_of_what_is_long(whole: Any) -> None:
    _, _, _, logs, folder = whole
    files = list(folder.iterdir())
    assert len(files) <= MAX_FILES
    part = logs.partition("======== writes_much")[2].partition("======== passes")[0]
    assert len(part) <= 3 << 20
    assert part.count("bytes left out") == 3
    assert '"passed": true' in part
    assert "x" * 100 in part
    assert "y" * 100 in part
    assert "---- more.log" in part


@pytest.mark.parametrize("steps", [1, 18, 200])
def test_no_number_of_steps_leaves_more_than_eight_files_or_a_larger_one(steps: int, tmp_path: Path) -> None:
    log = tmp_path / "err"
    log.write_bytes(b"e" * 9_000)
    output = Output(tmp_path / "out", max_file_bytes=20_000, max_step_bytes=4_000)
    for number in range(steps):
        output.add({"step": f"step {number}", "state": "passed", "seconds": 1.0}, [log])
    logs = list((tmp_path / "out").glob("log-*"))
    assert len(list((tmp_path / "out").iterdir())) <= MAX_FILES
    assert all(path.stat().st_size <= 20_000 for path in logs)
    assert len(output.rows) == steps


def test_a_run_ends_in_its_time_and_what_was_left_is_reported(tmp_path: Path) -> None:
    began = time.monotonic()
    code, last, rows, _ = run(tmp_path, "--only", "hangs,passes", "--seconds", "3")
    assert time.monotonic() - began < 30 * slowdown()
    assert rows["hangs"]["state"] == "deadline"
    assert rows["passes"]["state"] == "not run"
    assert (code, last["steps"], last["failed"]) == (1, 2, 2)


def test_only_the_steps_asked_for_run(tmp_path: Path) -> None:
    code, last, rows, _ = run(tmp_path, "--only", "passes")
    assert (code, last["steps"], last["failed"], list(rows)) == (0, 1, 0, ["passes"])


def test_a_step_that_is_not_there_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu_day", "--device", "cpu", "--only", "ceiling"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 2
    assert "there is no step ceiling; there are ceilings, " in done.stderr


def test_the_plan_names_every_step_once_and_has_a_module_for_each() -> None:
    names = [each.name for each in PLAN]
    assert len(names) == len(set(names)) >= 16
    assert all(each.seconds > 0 and each.shows for each in PLAN)
