"""The examples of trainers, before and after the library came in: few lines differ, and no loss."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, run_script

SMALL = ("--steps", "6", "--sequence-length", "32", "--layers", "2", "--width", "64")


def test_few_lines_change() -> None:
    before, after = (EXAMPLES / name for name in ("trainer_plain.py", "trainer.py"))
    changes = [
        line
        for line in difflib.ndiff(before.read_text().splitlines(), after.read_text().splitlines())
        if line.startswith("+ ")
    ]
    assert len(changes) == 5  # one is the description


def test_the_losses_and_metrics_are_those_of_one_process(tmp_path: Path) -> None:
    plain = run_script(EXAMPLES / "trainer_plain.py", *SMALL, "--batch-size", "8", folder=tmp_path)
    parameters = json.dumps({"pipeline_parallel_degree": 2})
    split = run_script(
        EXAMPLES / "trainer.py", *SMALL, "--batch-size", "4", ranks=4, folder=tmp_path, SM_HP_MP_PARAMETERS=parameters
    )
    assert len(plain["losses"]) == 6
    assert split["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert split["accuracies"] == pytest.approx(plain["accuracies"], abs=1e-3)
