"""Plants each fault, runs the tests that are likely to find it and else all of ``make test``, and takes it back."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from tests.jobs.forked import ROOT

from .faults import FAULTS, Fault

#: Of cargo, where a fault does not even compile, which shows nothing.
_NOT_COMPILED = "could not compile"
#: Where proptest writes the cases that it finds; those of a planted fault are nobody's.
_FOUND_CASES = (":(glob)crates/**/*.proptest-regressions", ":(glob)crates/**/proptest-regressions/**")


def clean(faults: Sequence[Fault]) -> None:
    """See to it that what is planted in is committed, and that every fault fits.

    Raises:
        SystemExit: Something is not; says what.
    """
    files = sorted({fault.file for fault in faults})
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", *files, *_FOUND_CASES],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    if changed:
        raise SystemExit(f"mutants: commit these files first, faults are planted in them:\n{changed}")
    for fault in faults:
        found = (ROOT / fault.file).read_text().count(fault.old)
        if found != 1:
            raise SystemExit(f"mutants: {fault.file} has {found} times, and not once: {fault.old}")


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The fault stands in its file."""
    file = ROOT / fault.file
    text = file.read_text()
    try:
        file.write_text(text.replace(fault.old, fault.new))
        yield
    finally:
        file.write_text(text)
        subprocess.run(["git", "restore", "--", _FOUND_CASES[0]], cwd=ROOT, check=True)
        subprocess.run(["git", "clean", "--quiet", "-d", "--force", "--", *_FOUND_CASES], cwd=ROOT, check=True)


def fails(*command: str) -> bool:
    """Whether tests fail, which is not to say that they cannot be built."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode and _NOT_COMPILED in done.stdout and "error[E" in done.stdout:
        raise SystemExit(f"mutants: a fault does not compile:\n{done.stdout}")
    return done.returncode != 0


def caught_by(fault: Fault) -> str | None:
    """Which part of ``make test`` finds the fault; None if all of it passes."""
    first, *_ = fault.tests
    if "/" in first:
        likely = [sys.executable, "-m", "pytest", "--quiet", "--exitfirst", *fault.tests]
    else:
        likely = ["cargo", "test", "--quiet", "--package", first]
    if fails(*likely):
        return " ".join(fault.tests)
    return "make test" if fails("make", "test") else None


def main() -> int:
    """Parse, plant, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("areas", nargs="*", help="areas or descriptions, with * and ?; all by default")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that a fault is taken back
    faults = [
        fault
        for fault in FAULTS
        if not given.areas
        or any(fnmatch.fnmatch(text, area) for area in given.areas for text in (fault.area, fault.what))
    ]
    clean(faults)
    table = Table("area", "fault", "caught by", "seconds")
    caught = 0
    for fault in faults:
        began = time.monotonic()
        print(f"mutants: {fault.area}: {fault.what}", file=sys.stderr)
        with planted(fault):
            by = caught_by(fault)
        caught += by is not None
        table.add_row(fault.area, fault.what, by or "NOTHING", f"{time.monotonic() - began:.0f}")
    subprocess.run(["make", "--silent", "build"], cwd=ROOT, check=True)  # without the last fault
    Console().print(table)
    print(json.dumps({"planted": len(faults), "caught": caught}), flush=True)
    return 0 if caught == len(faults) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
