"""Delayed parameters over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_ranks_make_what_they_own(pp: int, tp: int) -> None:
    for output in outputs_of_ranks(Path(__file__).with_name("job.py"), str(pp), str(tp)):
        assert output.splitlines()[-1] == "all hold"


def test_ranks_read_what_they_own_of_files(tmp_path: Path) -> None:
    for output in outputs_of_ranks(Path(__file__).with_name("reading.py"), str(tmp_path)):
        assert output.splitlines()[-1] == "all hold"
