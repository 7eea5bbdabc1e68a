"""The stand-in for CUDA's driver, for machines without one."""

from __future__ import annotations

import os
import subprocess

from tests.jobs.forked import ROOT

#: Names the library where a process that started this one has built it.
BUILT = "SHARDWRIGHT_TESTS_REHEARSAL"


def build_rehearsal() -> str:
    """Build the library, once for this process and those that it starts; its path."""
    if BUILT not in os.environ:
        command = ["cargo", "build", "--quiet", "--locked", "--package", "shardwright-cuda-rehearsal"]
        subprocess.run(command, cwd=ROOT, check=True)
        os.environ[BUILT] = str(ROOT / "target" / "debug" / "libshardwright_cuda_rehearsal.so")
    return os.environ[BUILT]
