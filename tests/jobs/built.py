"""What some tests need besides the extension: cargo builds it once for a process and those that it starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .forked import ROOT

_FOLDER = ROOT / "target" / "debug"


def build_rehearsal() -> str:
    """The path of the stand-in for CUDA's driver, for machines without one."""
    library = _FOLDER / "libshardwright_cuda_rehearsal.so"
    return _built("SHARDWRIGHT_TESTS_REHEARSAL", library, "shardwright-cuda-rehearsal")


def build_hostile_member() -> str:
    """The path of the program that joins a job to harm it."""
    program = _FOLDER / "examples" / "hostile_member"
    return _built(
        "SHARDWRIGHT_TESTS_HOSTILE_MEMBER",
        program,
        "shardwright-comm",
        "--features",
        "fuzzing",
        "--example",
        program.name,
    )


def _built(variable: str, made: Path, package: str, *options: str) -> str:
    """Build a package's part; ``variable`` names it where a process that started this one has built it."""
    if variable not in os.environ:
        command = ["cargo", "build", "--quiet", "--locked", "--package", package, *options]
        subprocess.run(command, cwd=ROOT, check=True)
        os.environ[variable] = str(made)
    return os.environ[variable]
