"""Another commit of the library, built as wheels are, so that it can be measured in turns with this one."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benches.ranks import ROOT

_FOLDER = ROOT / ".cache" / "beside"


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Let a command take the commit, and the bar of what it measures."""
    parser.add_argument("--beside", metavar="COMMIT", help="measure that commit too, in turns, and only both")
    parser.add_argument("--at-most", type=float, default=1.05, help="of the other commit's time (%(default)s)")


def conclude(figures: Mapping[str, float], at_most: float) -> int:
    """Print the ratios as a line of JSON, after those that miss the bar; return 1 if one does."""
    missed = {name: figure for name, figure in figures.items() if figure > at_most}
    for name, figure in missed.items():
        print(f"missed: {name} is {figure:.3f}; the bar is {at_most:g}")
    print(json.dumps(figures), flush=True)
    return int(bool(missed))


def variables_of(commit: str) -> dict[str, str]:
    """The environment variables with which a process imports the library as of a commit, and the benches of this one.

    Checks the commit out and builds it, once.

    Raises:
        SystemExit: There is no such commit, or it does not build; git or cargo has said why.
    """
    number = _output("git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if not number:
        raise SystemExit(f"--beside: there is no commit {commit!r}")
    checkout = _FOLDER / number
    extension = checkout / "python" / "shardwright" / "_core.abi3.so"
    if not extension.exists():
        print(f"building {commit}, once", file=sys.stderr)
        shutil.rmtree(checkout, ignore_errors=True)
        checkout.mkdir(parents=True)
        archive = subprocess.Popen(["git", "archive", number], cwd=ROOT, stdout=subprocess.PIPE)
        # As old as their commit, the sources would pass for those of another commit in the target folder.
        _run("tar", "--extract", "--touch", "--directory", str(checkout), stdin=archive.stdout)
        archive.wait()
        # One target folder for all such commits: what they depend on is compiled once. It is not the usual one,
        # where their newer files would pass for its own.
        target, manifest = ROOT / "target" / "beside", checkout / "Cargo.toml"
        _run(
            *("cargo", "build", "--quiet", "--release", "--locked", "--package", "shardwright-py"),
            *("--manifest-path", str(manifest), "--target-dir", str(target)),
        )
        shutil.copy(target / "release" / "lib_core.so", extension)
    return {"PYTHONPATH": f"{ROOT}:{checkout / 'python'}"}


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of this commit's figure over the other's."""
    return statistics.median(one / other for one, other in zip(ours, others, strict=True))


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.strip()


def _run(*command: str, stdin: object = None) -> None:
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYO3_BUILD_EXTENSION_MODULE": "1"}, stdin=stdin)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"--beside: {command[0]} failed")
