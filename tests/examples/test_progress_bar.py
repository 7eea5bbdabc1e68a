"""The example shows a person a bar with loss and step time, and writes nothing of it to a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import termios
import threading
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES
from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ranks import forked_ranks, run_ranks

SCRIPTS = [(EXAMPLES / "train_gpt_plain.py", 0), (EXAMPLES / "train_gpt.py", 2)]
SMALL = ("--steps", "30", "--batch-size", "4", "--sequence-length", "16", "--layers", "2", "--width", "32")
CONFIGURATION = {"SM_HP_MP_PARAMETERS": json.dumps({"pipeline_parallel_degree": 2})}


def on_a_terminal(script: Path, ranks: int, folder: Path) -> str:
    """Run a script whose standard error stream is a terminal, and return what it writes there."""
    ours, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (40, 120))  # without columns there is no room for a bar
    pieces: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(ours, 1 << 12):
                pieces.append(piece)
        except OSError:  # nobody has the terminal any more
            pass

    command = [script, *SMALL]
    processes = forked_ranks(
        command, ranks, folder=folder, environment=CONFIGURATION, stdout=subprocess.DEVNULL, stderr=terminal
    )
    reader = threading.Thread(target=read)
    reader.start()
    try:
        codes = [process.wait(HANG_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
        os.close(terminal)
        reader.join(HANG_SECONDS)
        os.close(ours)
    assert codes == [0] * len(processes), b"".join(pieces).decode()
    return b"".join(pieces).decode()


@pytest.mark.parametrize(("script", "ranks"), SCRIPTS, ids=["plain", "two ranks"])
def test_a_person_sees_one_bar_with_loss_and_step_time(script: Path, ranks: int, tmp_path: Path) -> None:
    shown = on_a_terminal(script, ranks, tmp_path)
    last = [line for line in re.split(r"[\r\n]+", shown) if "30/30" in line]
    assert last, shown
    assert re.search(r"100%\|.*loss=\d\.\d{3}, step_ms=\d+\.\d, tokens_per_s=\d+", last[-1])
    assert len([line for line in shown.split("\n") if "30/30" in line]) == 1


@pytest.mark.parametrize(("script", "ranks"), SCRIPTS, ids=["plain", "two ranks"])
def test_a_file_gets_no_bar(script: Path, ranks: int, tmp_path: Path) -> None:
    for ended in run_ranks(script, *SMALL, ranks=ranks, folder=tmp_path, environment=CONFIGURATION):
        assert ended.code == 0, ended.err
        assert "step_ms" not in ended.err
        assert "\r" not in ended.err
