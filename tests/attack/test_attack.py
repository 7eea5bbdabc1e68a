"""A short attack; `make attack` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.jobs.patience import HANG_SECONDS

from . import members
from .__main__ import MOST_GROWTH_MB


@pytest.mark.slow
def test_strangers_are_survived_by_a_job_that_encrypts() -> None:
    command = [sys.executable, "-m", "tests.attack", "--count", "2", "--only", "2 ranks, encrypted"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    total = json.loads(done.stdout.splitlines()[-1])
    assert total["attacks"] == total["survived"] > 0
    assert total["inexact"] == total["listeners_outside"] == 0


@pytest.mark.parametrize("attack", ["many early parts", "many messages begun"])
def test_a_member_that_sends_too_much_ahead_costs_little_memory_and_ends_the_job_by_name(attack: str) -> None:
    (outcome,) = members.over_ucx(2, [attack])
    assert outcome.survived == outcome.attacks == members.OVER_UCX[attack], outcome
    assert outcome.inexact == 0
    assert outcome.growth_mb < MOST_GROWTH_MB
