"""Runs the tests: those that a change must pass, all there are, or some of them many times; see ``--help``."""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.jobs.built import build_hostile_member, build_rehearsal
from tests.jobs.forked import ADDRESS, ROOT, fork_server
from tests.jobs.patience import SLOWER

#: What says how many tests run at once, each worker with a file, here and in parts that are processes of their own.
WORKERS = "SHARDWRIGHT_TESTS_WORKERS"
#: Files in their order, each to one worker.
DISTRIBUTED = ("--dist=loadfile", "--no-loadscope-reorder")
#: What tests took, by folder, and how many of the longest of each are named.
SECONDS, LONGEST = ROOT / "out" / "test_seconds.txt", 5
_CARGO_RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed", re.MULTILINE)


@dataclass
class Part:
    """What came of one part.

    Attributes:
        name: What it is called.
        key: What the last line calls its number.
        passed: How many passed.
        failed: How many failed; at least one if its command did.
        seconds: How long it took.
    """

    name: str
    key: str
    passed: int
    failed: int
    seconds: float


def rust() -> Part:
    """The Rust tests."""
    began = time.monotonic()
    # More threads than cores: those of communication mostly wait.
    environment = {**os.environ, "RUST_TEST_THREADS": "8"}
    command = ["cargo", "test", "--workspace", "--locked", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    found = [(int(passed), int(failed)) for passed, failed in _CARGO_RESULT.findall(done.stdout)]
    passed, failed = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        failed = max(failed, 1)
    return Part("Rust", "rust_tests", passed, failed, time.monotonic() - began)


def run_pytest(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Run pytest, whose words go to the standard error stream; how many passed, and the names of those that did not.

    What each folder took, with the longest tests, is left in :data:`SECONDS`.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-tests-") as folder:
        report = Path(folder) / "report.xml"
        workers = os.environ.get(WORKERS, "2")
        command = [sys.executable, "-m", "pytest", "--quiet", f"--junitxml={report}", f"-n{workers}", *arguments]
        if slower := os.environ.get(SLOWER):
            options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
            command.append(f"--timeout={options['timeout'] * float(slower):.0f}")
        code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode
        cases = [*ElementTree.parse(report).iter("testcase")] if report.exists() else []
        outcomes = collections.Counter(
            (f"{case.get('classname')}::{case.get('name')}", any(child.tag in ("failure", "error") for child in case))
            for case in cases
            if case.find("skipped") is None
        )
    write_seconds(cases)
    failed = [name for name, is_failed in outcomes if is_failed]
    if code and not failed:
        failed = [f"pytest itself, with {code}"]
    return len(outcomes) - len(failed), failed


def write_seconds(cases: Sequence[ElementTree.Element]) -> None:
    """Write what the tests of each folder took, with the longest, to :data:`SECONDS`."""
    by_folder: dict[str, list[tuple[float, str]]] = collections.defaultdict(list)
    for case in cases:
        file = case.get("classname") or "tests.?"
        by_folder[file.split(".")[1]].append((float(case.get("time") or 0), f"{file}::{case.get('name')}"))
    folders = sorted(by_folder.items(), key=lambda item: -sum(seconds for seconds, _ in item[1]))
    lines = []
    for folder, tests in folders:
        lines.append(f"{sum(seconds for seconds, _ in tests):8.1f} s {len(tests):5} tests  {folder}")
        lines += [f"{seconds:8.1f} s            {name}" for seconds, name in sorted(tests, reverse=True)[:LONGEST]]
    SECONDS.parent.mkdir(exist_ok=True)
    SECONDS.write_text("\n".join(lines) + "\n")


def python(marked: str, *where: str) -> Callable[[], Part]:
    """The Python tests with these marks, of all folders or of some."""

    def run() -> Part:
        began = time.monotonic()
        passed, failed = run_pytest([*DISTRIBUTED, "-m", marked, *where])
        return Part("Python", "python_tests", passed, len(failed), time.monotonic() - began)

    return run


def counted(
    module: str, *arguments: str, key: str = "parity_cases", what: str = "cases", **environment: str
) -> Callable[[], Part]:
    """A module whose last line counts, as JSON, ``what`` it went through and how many of them failed."""

    def run() -> Part:
        began = time.monotonic()
        command = [sys.executable, "-m", module, *arguments]
        # Its progress would be drawn over that of the Python tests.
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
        cases, failed = 0, 1
        if done.stdout:
            counts = json.loads(done.stdout.splitlines()[-1])
            cases, failed = counts[what], counts["failed"]
        if done.returncode:
            print(done.stderr, done.stdout, sep="\n", file=sys.stderr)
            failed = max(failed, 1)
        return Part(module.removeprefix("tests."), key, cases - failed, failed, time.monotonic() - began)

    return run


GPU_REHEARSAL = counted(
    "tools.gpu_day",
    *("--device", "cpu", "--tiny", "--folder", "out/gpu_rehearsal"),
    key="gpu_steps",
    what="steps",
    OMP_NUM_THREADS="1",
)
PAIRWISE = (
    counted("tests.parity", "--pairwise"),
    counted("tests.parity_tp", "--pairwise"),
    counted("tests.parity_memory", "--few"),
)
WHOLE = (counted("tests.parity"), counted("tests.parity_tp"), counted("tests.parity_memory"))
#: What makes torch and oneDNN compute as on a processor that has AVX2 and nothing newer.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
#: Where results are rounded to a few digits, so that the processor's order of summation shows.
ROUNDED = ("tests/half_precision", "tests/trainers")
QUICK = (python("not gpu and not slow"), rust, *PAIRWISE, GPU_REHEARSAL)
#: In a process of its own: torch chooses its code paths once.
LIMITED = counted("tests", "--avx2", key="tests_with_avx2", what="tests")
ALL = (python("not gpu"), rust, *WHOLE, GPU_REHEARSAL, LIMITED)
#: Parts that run at once: ranks wait for one another half of the time.
LANES = 2


def run_parts(parts: Sequence[Callable[[], Part]]) -> int:
    """Run parts, print a table of them, and the counts as a JSON object; the exit status."""
    began = time.monotonic()

    def run(part: Callable[[], Part]) -> Part:
        done = part()
        print(f"{done.name}: {done.passed} passed, {done.failed} failed in {done.seconds:.0f} s", file=sys.stderr)
        return done

    with ThreadPoolExecutor(LANES) as pool:
        done = list(pool.map(run, parts))
    table = Table("part", "passed", "failed", "seconds")
    for each in done:
        table.add_row(each.name, str(each.passed), str(each.failed), f"{each.seconds:.0f}")
    Console().print(table)
    failed = sum(each.failed for each in done)
    print(f"{sum(each.passed for each in done)} passed, {failed} failed")
    counts: collections.Counter[str] = collections.Counter()
    for each in done:
        counts[each.key] += each.passed
    total = {"tests": sum(each.passed for each in done) + failed, "failed": failed}
    print(json.dumps({**counts, **total, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    return 1 if failed else 0


@contextmanager
def loaded(processes: int) -> Iterator[None]:
    """Keep the processors busy with so many processes of nothing."""
    work = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    busy = [subprocess.Popen([sys.executable, "-c", work]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def repeat(times: int, what: Sequence[str]) -> int:
    """Run tests many times, and print a table of those that failed; the exit status."""
    failed: collections.Counter[str] = collections.Counter()
    for number in range(times):
        print(f"run {number + 1} of {times}", file=sys.stderr)
        failed.update(run_pytest([*DISTRIBUTED, "-m", "not gpu", *what])[1])
    table = Table("test", f"failed of {times}")
    for name, number in failed.most_common():
        table.add_row(name, str(number))
    Console().print(table)
    print(json.dumps({"runs": times, "tests_that_failed": len(failed)}), flush=True)
    return 1 if failed else 0


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("--all", action="store_true", help="slow tests and whole parity tables too")
    parser.add_argument("--repeat", type=int, metavar="TIMES", help="run the tests named so often instead")
    parser.add_argument(
        "--avx2", action="store_true", help="half precision, trainers and parity as on a processor without AVX-512"
    )
    parser.add_argument("--load", type=int, default=0, metavar="PROCESSES", help="run beside so many busy processes")
    parser.add_argument("--workers", type=int, metavar="COUNT", help="Python tests that run at once; 2 by default")
    parser.add_argument("tests", nargs="*", help="files, folders or tests to repeat; all by default")
    given = parser.parse_args()
    if given.workers:
        os.environ[WORKERS] = str(given.workers)
    if given.load:  # who gets a core for one moment waits for as many as there are processes for each
        os.environ[SLOWER] = str(1 + given.load / (os.cpu_count() or 1))
    if given.avx2:
        os.environ.update(AVX2)
        os.environ.pop(ADDRESS, None)  # that of a server whose torch has chosen already
    fork_server()  # one for all parts
    build_rehearsal()  # cargo would wait for the Rust lane's own build
    build_hostile_member()
    limited = (python("not gpu and not slow", *ROUNDED), *PAIRWISE)
    with loaded(given.load):
        if given.repeat:
            return repeat(given.repeat, given.tests)
        return run_parts(limited if given.avx2 else ALL if given.all else QUICK)


if __name__ == "__main__":
    sys.exit(main())
