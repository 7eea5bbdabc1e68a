"""The tests that need a CUDA device; without one, that they are found, and those of the same folder that need none."""

from __future__ import annotations

import collections
import faulthandler
import os
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from tests.jobs.forked import ROOT, fork_server
from tools.gpu_day.options import Options

_WORKERS = 6
#: Without a device: quick tests beside those that need one.
_REHEARSED = ("tests/device/test_streams.py",)


def files() -> list[str]:
    """The files with tests that are marked; the others may need packages that the machine does not have."""
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    if not found:
        raise RuntimeError("no test is marked gpu")
    return found


class Collected:
    """Counts the tests that pytest found."""

    def __init__(self) -> None:
        """None so far."""
        self.count = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count."""
        self.count = len(session.items)


def run_pytest(*arguments: str) -> tuple[int, int]:
    """Run pytest in this process, in the project's folder; its exit code, and how many tests it found."""
    collected = Collected()
    code = pytest.main(["-p", "no:cacheprovider", "--color=no", "-rfE", "-q", *arguments], plugins=[collected])
    faulthandler.cancel_dump_traceback_later()  # the tests' own, for a process that ends after them
    return int(code), collected.count


def run(options: Options) -> dict[str, Any]:
    """Run them; it passes if all did, and some did."""
    report, marked = f"--junitxml={options.folder / 'report.xml'}", files()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.device == "cuda":
        fork_server()  # one for all workers
        code, _ = run_pytest(f"-n{_WORKERS}", "-m", "gpu", report, *marked)
        count = None
    else:
        code, count = run_pytest("--collect-only", "-m", "gpu", *marked)
        if code == 0:
            code, _ = run_pytest("-n0", report, *_REHEARSED)
    written = options.folder / "report.xml"
    outcomes: collections.Counter[str] = collections.Counter()
    failed = []
    for case in ElementTree.parse(written).iter("testcase") if written.exists() else ():
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[bad[0] if bad else "passed"] += 1
        if bad and bad[0] != "skipped":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    found = {"exit_code": code, **outcomes, "failed_tests": failed}
    if count is not None:
        found["collected"] = count
    passed = code == 0 and outcomes["passed"] > 0 and outcomes["skipped"] == 0 and count != 0
    return {**found, "passed_tests": outcomes["passed"], "passed": passed}
