"""Builds the fuzz targets and lets the fuzzer run each of them for a while, beginning with the kept inputs.

usage: python tools/fuzz.py [--seconds 60] [--keep 25] [TARGET ...]

Prints a table, and a last line of JSON. The exit code is 1 when an input broke a law; it is then kept in
``.cache/fuzz/findings``. What the fuzzer finds new is carried on with from run to run in ``.cache/fuzz/corpus``;
``--keep`` adds the smallest of it to the inputs that every test run tries (``fuzz/corpus``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUZZ = ROOT / "fuzz"
CACHE = ROOT / ".cache" / "fuzz"
BUILD = ROOT / "target" / "fuzz"
#: The longest input: enough for several messages.
MAX_BYTES = 8192
#: The longest of the kept inputs.
MAX_KEPT_BYTES = 1024
#: One input may take this many seconds, and the process this much memory.
INPUT_SECONDS = 10
MAX_MEMORY_MB = 2048
#: How much longer than asked a run may take to end.
MARGIN_SECONDS = 60


def build() -> Path:
    """Build all targets; the folder of the programs."""
    command = ["cargo", "fuzz", "build", "--fuzz-dir", str(FUZZ), "--target-dir", str(BUILD)]
    # The instrumentation's switches are for developers of Rust; the variable lets the stable compiler take them.
    subprocess.run(command, check=True, cwd=FUZZ, env={**os.environ, "RUSTC_BOOTSTRAP": "1"})
    (programs,) = BUILD.glob("*/release")
    return programs


def targets() -> list[str]:
    """The names of all targets."""
    return sorted(path.stem for path in (FUZZ / "fuzz_targets").glob("*.rs"))


def run(program: Path, seconds: int) -> tuple[int, list[Path]]:
    """Fuzz one target; the number of executions, and the inputs that broke a law."""
    name = program.name
    corpus, findings = CACHE / "corpus" / name, CACHE / "findings" / name
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    began = time.time()
    options = [f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", f"-timeout={INPUT_SECONDS}"]
    options += [f"-rss_limit_mb={MAX_MEMORY_MB}", f"-artifact_prefix={findings}/", "-print_final_stats=1"]
    done = subprocess.run(
        [str(program), *options, str(corpus), str(FUZZ / "corpus" / name)],
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        timeout=seconds + MARGIN_SECONDS,
    )
    found = sorted(path for path in findings.iterdir() if path.stat().st_mtime >= began)
    executions = re.search(r"stat::number_of_executed_units: *(\d+)", done.stderr)
    if done.returncode != 0 or executions is None:
        print(done.stderr[-4000:], file=sys.stderr)
        if not found:
            raise SystemExit(f"fuzz: {name} ended with {done.returncode} without saying why")
    return int(executions[1]) if executions else 0, found


def keep(program: Path, most: int) -> None:
    """Add the smallest inputs that reach something new to those of the tests."""
    name = program.name
    kept = FUZZ / "corpus" / name
    with tempfile.TemporaryDirectory() as folder:
        merge = [
            str(program),
            "-set_cover_merge=1",
            f"-max_len={MAX_KEPT_BYTES}",
            folder,
            str(CACHE / "corpus" / name),
        ]
        subprocess.run(merge, check=True, stderr=subprocess.DEVNULL)
        for path in sorted(Path(folder).iterdir(), key=lambda path: (path.stat().st_size, path.name))[:most]:
            shutil.copy(path, kept / path.name)


def main() -> int:
    """Run the targets one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--keep", type=int, default=0, metavar="INPUTS", help="add so many inputs of each target")
    parser.add_argument("targets", nargs="*", choices=[*targets(), []], metavar="TARGET")
    options = parser.parse_args()
    programs = build()
    executions, findings = 0, []
    chosen = options.targets or targets()
    began = time.monotonic()
    print(f"{'target':12} {'executions':>12} {'a second':>10} {'inputs':>7} findings", flush=True)
    for name in chosen:
        number, found = run(programs / name, options.seconds)
        executions += number
        findings += found
        inputs = len(list((CACHE / "corpus" / name).iterdir()))
        named = " ".join(str(path.relative_to(ROOT)) for path in found) or "none"
        print(f"{name:12} {number:12,} {number // max(options.seconds, 1):10,} {inputs:7,} {named}", flush=True)
        if options.keep:
            keep(programs / name, options.keep)
    seconds = round(time.monotonic() - began)
    print(json.dumps({"targets": len(chosen), "seconds": seconds, "executions": executions, "findings": len(findings)}))
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
