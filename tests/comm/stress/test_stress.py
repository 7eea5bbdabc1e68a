"""A short form of ``make stress``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.patience import HANG_SECONDS

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_messages_arrive_once_intact_and_in_order_and_survivors_name_the_killed_rank() -> None:
    command = [sys.executable, "-m", "tests.comm.stress", "--messages", "10000", "--minutes", "0", "--kills", "5"]
    path = f"{ROOT / 'python'}:{ROOT}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["messages"] >= 10_000
    assert result["reported_within_5_s"] == 5 * 3
