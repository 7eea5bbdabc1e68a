"""A job of several ranks is one run of a tracker, and one progress bar."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.ranks import run_ranks, told

PROGRAM = Path(__file__).with_name("trackers_rank.py")
#: Which ranks run a function that accelerate's decorators keep to some. Those of a pipeline have the same samples.
RAN = {
    "pp2": (
        "on_main_process, on_local_main_process, on_process 0, on_local_process 0",
        "on_last_process, on_local_process 1",
    ),
    "dp2": (
        "on_main_process, on_local_main_process, on_process 0, on_local_process 0",
        "on_last_process, on_process 1, on_local_process 1",
    ),
}


@pytest.mark.parametrize("layout", sorted(RAN))
def test_a_job_is_one_run_and_one_progress_bar(layout: str, tmp_path: Path) -> None:
    ended = run_ranks(PROGRAM, layout, str(tmp_path), ranks=2)
    assert all(each.code == 0 for each in ended), told(ended)
    for library in ("transformers", "accelerate", "lightning"):
        (run,) = (tmp_path / library).iterdir()
        assert run.read_text().count("loss") >= 2, library
    first, second = ended
    for bar in ("2/2", "of accelerate"):
        assert bar in first.err, "a progress bar of rank 0"
    assert not any(sign in second.err + second.out for sign in ("it/s", "%|")), second.err
    assert tuple(f"ran: {ran}" in each.out for each, ran in zip(ended, RAN[layout], strict=True)) == (True, True)
