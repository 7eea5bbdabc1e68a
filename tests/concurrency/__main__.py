"""Runs the laws of threads under chosen orders and the tests of raw memory under AddressSanitizer; prints a table.

usage: python -m tests.concurrency [--faults [LAW ...]]

With ``--faults`` it plants a fault for each law instead (``faults.py``), and the law has to catch it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.jobs.forked import ROOT
from tests.mutants.__main__ import clean, planted

from .faults import FAULTS, MEMORY

#: The crates with laws, which the feature ``shuttle`` puts on scheduled threads.
_CRATES = ("shardwright-buffers", "shardwright-comm", "shardwright-offload", "shardwright-runtime")
#: The sanitizer is compiled into what runs, and not into build scripts: hence a target by name.
_TARGET = "x86_64-unknown-linux-gnu" if os.uname().machine == "x86_64" else "aarch64-unknown-linux-gnu"
_SANITIZED = Path("target", "asan")
_DRIVER = "libshardwright_cuda_rehearsal.so"
#: The crates that reach raw memory: mapped buffers, devices on the rehearsal's driver, UCX itself; and what uses them.
_RAW = [f"--package=shardwright-{name}" for name in ("buffers", "cuda", "ucx", "comm")]


@dataclass(frozen=True)
class Result:
    """How a check ended. ``schedules`` are the orders of threads that it ran, none where the system chose."""

    what: str
    tool: str
    schedules: int
    seconds: float
    outcome: str


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a command."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def laws(crate: str, name: str = "concurrency::") -> tuple[int, str]:
    """Run a crate's laws (all, or those of a name): exit code and output."""
    command = ["cargo", "test", "--quiet", "--package", crate, "--features", "shuttle", "--lib", "--"]
    return _run([*command, name, "--nocapture"], dict(os.environ))


def names(crate: str) -> list[str]:
    """A crate's laws, by their tests' names."""
    command = ["cargo", "test", "--quiet", "--package", crate, "--features", "shuttle", "--lib", "--"]
    listed = subprocess.run(
        [*command, "concurrency::", "--list"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return re.findall(r"^(\S+): test$", listed, re.MULTILINE)


def explore(crate: str) -> Iterator[Result]:
    """Run a crate's laws under shuttle."""
    expected = names(crate)
    code, output = laws(crate)
    found: dict[str, tuple[int, float]] = {}
    for name, schedules, seconds in re.findall(r"explored (\S+) (\d+) ([\d.]+)", output):
        before = found.get(name, (0, 0.0))
        found[name] = (before[0] + int(schedules), before[1] + float(seconds))
    failed = set(re.findall(r"^    (\S+)$", output, re.MULTILINE)) | (set(expected) - set(found))
    if code and not failed:
        failed = set(expected)
    if failed:
        print(output[-20_000:], file=sys.stderr)
    for name in expected:
        schedules, seconds = found.get(name, (0, 0.0))
        outcome = "FAILED" if name in failed else "holds"
        yield Result(name.rsplit("::", 1)[1].replace("_", " "), "shuttle", schedules, seconds, outcome)


def sanitize() -> tuple[int, str]:
    """Run the tests of raw memory with AddressSanitizer, which is compiled into them: exit code and output."""
    # The switch is for developers of Rust; the variable lets the stable compiler take it. Leaks are no matter here: UCX
    # is loaded for good, and keeps what it has.
    environment = {
        **os.environ,
        "RUSTC_BOOTSTRAP": "1",
        "RUSTFLAGS": "-Zsanitizer=address",
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    tests = ["cargo", "test", "--quiet", "--target", _TARGET, "--target-dir", str(_SANITIZED), "--lib"]
    tests += _RAW
    built = _run([*tests, "--no-run"], environment)
    if built[0]:
        return built
    # The driver's stand-in is a library of its own, and a driver has no sanitizer in it.
    driver = ["cargo", "build", "--quiet", "--package", "shardwright-cuda-rehearsal", "--target-dir", "target"]
    built = _run(driver, dict(os.environ))
    if built[0]:
        return built
    shutil.copy(ROOT / "target" / "debug" / _DRIVER, ROOT / _SANITIZED / _TARGET / "debug" / "deps" / _DRIVER)
    return _run([*tests, "--", "--skip=conformance::"], environment)


def check_memory() -> Result:
    """Whether the tests of raw memory pass with AddressSanitizer."""
    began = time.monotonic()
    code, output = sanitize()
    passed = sum(int(count) for count in re.findall(r"(\d+) passed", output))
    holds = code == 0 and passed > 0
    if not holds:
        print(output[-20_000:], file=sys.stderr)
    what = f"memory of buffers, devices and UCX ({passed} tests)"
    return Result(what, "AddressSanitizer", 0, time.monotonic() - began, "holds" if holds else "FAILED")


def check() -> int:
    """Run everything and print.

    Raises:
        SystemExit: A fault does not fit any more; says which.
    """
    for fault in FAULTS:
        if (ROOT / fault.file).read_text().count(fault.old) != 1:
            raise SystemExit(f"concurrency: {fault.file} does not have once what a fault replaces: {fault.old}")
    began = time.monotonic()
    results: list[Result] = []
    for crate in _CRATES:
        print(f"concurrency: {crate}", file=sys.stderr)
        results += explore(crate)
    print("concurrency: AddressSanitizer", file=sys.stderr)
    results.append(check_memory())
    table = Table("what", "tool", "schedules", "seconds", "outcome")
    for result in results:
        schedules = str(result.schedules) if result.schedules else ""
        table.add_row(result.what, result.tool, schedules, f"{result.seconds:.1f}", result.outcome)
    Console().print(table)
    failed = sum(result.outcome != "holds" for result in results)
    summary = {
        "checks": len(results),
        "failed": failed,
        "schedules": sum(result.schedules for result in results),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(summary), flush=True)
    return 1 if failed or not results else 0


def plant(chosen: list[str]) -> int:
    """Plant the faults and print whether their laws catch them."""
    faults = [
        fault
        for fault in FAULTS
        if not chosen or any(fnmatch.fnmatch(text, name) for name in chosen for text in (fault.area, fault.tests[1]))
    ]
    clean(faults)
    table = Table("law", "fault", "caught", "seconds")
    caught = 0
    for fault in faults:
        began = time.monotonic()
        crate, law = fault.tests
        print(f"concurrency: {fault.area}: {fault.what}", file=sys.stderr)
        with planted(fault):
            code, output = sanitize() if law == MEMORY else laws(crate, law)
        if "could not compile" in output:
            raise SystemExit(f"concurrency: a fault does not compile:\n{output[-4000:]}")
        found = code != 0 and (f"::{law}" in output or (law == MEMORY and "AddressSanitizer" in output))
        caught += found
        table.add_row(law, fault.what, "yes" if found else "NO", f"{time.monotonic() - began:.0f}")
    Console().print(table)
    print(json.dumps({"planted": len(faults), "caught": caught}), flush=True)
    return 0 if caught == len(faults) > 0 else 1


def main() -> int:
    """Parse."""
    parser = argparse.ArgumentParser(prog="python -m tests.concurrency", description=__doc__)
    parser.add_argument("--faults", nargs="*", metavar="LAW", help="plant faults instead: those of these laws or areas")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that a fault is taken back
    return check() if given.faults is None else plant(given.faults)


if __name__ == "__main__":
    sys.exit(main())
