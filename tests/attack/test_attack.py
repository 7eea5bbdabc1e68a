"""A short attack; `make attack` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_strangers_are_survived_by_a_job_that_encrypts() -> None:
    command = [sys.executable, "-m", "tests.attack", "--count", "2", "--only", "2 ranks, encrypted"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    total = json.loads(done.stdout.splitlines()[-1])
    assert total["attacks"] == total["survived"] > 0
    assert total["inexact"] == total["listeners_outside"] == 0
