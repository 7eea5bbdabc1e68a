"""Modules that keep something, on ranks that are processes: their timing is not that of ranks that take turns."""

import json
from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).parent / "keepers_program.py"


@pytest.mark.parametrize(
    "mode", ["fast", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("static", "dynamic"))]
)
def test_modules_that_keep_something_are_exact_in_processes(mode: str) -> None:
    for output in outputs_of_ranks(PROGRAM, mode):
        found = json.loads(output.splitlines()[-1])
        assert found == {"checked": 66, "wrong": []}
