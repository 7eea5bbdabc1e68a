"""A collective that will never end must not bring the process down when Python ends."""

from pathlib import Path

from tests.jobs.ranks import run_ranks

PROGRAM = Path(__file__).with_name("unfinished_work.py")


def test_a_work_under_way_is_kept_when_python_ends() -> None:
    ended = run_ranks(PROGRAM)
    assert [each.code for each in ended] == [0, 9], ended
