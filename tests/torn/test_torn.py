"""A short run of what ``make test-torn`` does, and that it finds what is torn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.patience import HANG_SECONDS
from tests.torn.damages import complaints, damages, prepared
from tests.torn.endings import first_save, judged, own_tag
from tests.torn.states import commit, write


@pytest.mark.parametrize("seed", ["a", "b"])
def test_a_newest_checkpoint_is_never_torn(seed: str) -> None:
    """Ten kills, and disks that are full eight times; in a process without threads, since the ranks are its forks."""
    command = [sys.executable, "-m", "tests.torn", "--kills=10", "--disks=4", "--damages=0", f"--seed={seed}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {"kills": 10, "torn": 0, "undetected": 0}


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """Forty of them."""
    undetected: list[str] = []
    assert damages(tmp_path / "damages", 40, "a", undetected).total() == 40
    assert undetected == []


def test_a_mixture_of_both_states_would_be_found(tmp_path: Path) -> None:
    """Parts of different steps, an older checkpoint than the last complete one, and one that is cut."""
    first_save(tmp_path)
    assert judged(tmp_path, 0, 0) == (0, "")
    assert "step 1 was complete" in judged(tmp_path, 1, 1)[1]
    commit(tmp_path, own_tag(1), 1, [write(tmp_path, own_tag(1), rank, rank) for rank in range(2)])
    assert "model/weight is not that of the state" in judged(tmp_path, 0, 1)[1]
    (tmp_path / "step1_partial" / "part-1.safetensors").write_bytes(b"")
    assert "part-1.safetensors has 0 bytes" in judged(tmp_path, 0, 1)[1]


def test_whole_files_are_not_refused(tmp_path: Path) -> None:
    """What makes the other findings mean something."""
    prepared(tmp_path)
    assert complaints(tmp_path) == ["", ""]
