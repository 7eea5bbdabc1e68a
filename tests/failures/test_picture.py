"""A picture of all ranks has fewer than 20 lines, and shows the rank that is elsewhere than the others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import shardwright as smp
from shardwright.job.runtime import current_runtime
from shardwright.stalls.picture import MAX_LINES, describe, picture, script_place, split_ranks

from tests.jobs.patience import HANG_SECONDS


def described(rank: int, place: str, lines: int = 6) -> str:
    further = (f"  also at other.py:{number}, in f  [the script]" for number in range(lines - 2))
    return "\n".join([f"rank {rank} at {place}", f"  step 3: rank {rank} on host 'a' has waited 30.0 s", *further])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 9, 10, 18, 19, 64, 1000])
@pytest.mark.parametrize("everywhere", [False, True])
def test_it_has_fewer_than_20_lines_with_the_one_before_it(ranks: int, everywhere: bool) -> None:
    places = [f"train.py:{rank if everywhere else 40}, in main: step()  [the script]" for rank in range(ranks)]
    lines = picture(described(rank, place, 30) for rank, place in enumerate(places)).splitlines()
    assert len(lines) <= MAX_LINES < 19
    if ranks <= 9:
        for rank, place in enumerate(places):  # nothing that is first is left out
            assert f"rank {rank} at {place}" in lines
            assert f"  step 3: rank {rank} on host 'a' has waited 30.0 s" in lines
    elif everywhere and ranks > MAX_LINES:
        assert lines[-1] == f"and {ranks - MAX_LINES + 1} more places"


def test_ranks_at_one_place_are_one_group_and_the_odd_one_comes_first() -> None:
    texts = [described(rank, "train.py:40, in main: step()") for rank in range(32)]
    texts[5] = described(5, "train.py:31, in save: torch.save(model)")
    texts[6] = "rank 6 did not answer within 3 s: it runs C code"
    texts[7] = "rank 7 did not answer within 3 s: it runs C code"
    shown = picture(texts).splitlines()
    assert shown[:2] == [texts[5].splitlines()[0], "  step 3: rank 5 on host 'a' has waited 30.0 s"]
    assert [line for line in shown if line.startswith("rank")] == [
        "rank 5 at train.py:31, in save: torch.save(model)",
        "ranks 6-7 did not answer within 3 s: it runs C code",
        "ranks 0-4, 8-31 at train.py:40, in main: step()",
    ]


def test_descriptions_that_were_joined_are_told_apart() -> None:
    texts = [described(0, "a.py:1, in f"), "rank 1 is gone", described(2, "b.py:2, in g")]
    assert split_ranks("\n".join(texts)) == texts


@pytest.fixture
def alone() -> Iterator[None]:
    smp.init({})
    yield
    smp.shutdown()


@pytest.mark.usefixtures("alone")
def test_a_rank_is_described_by_the_users_line_and_whole_stacks_are_for_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, go = threading.Event(), threading.Event()

    def waits_in_a_library() -> None:
        here.set()
        go.wait()

    thread = threading.Thread(target=waits_in_a_library)
    thread.start()
    try:
        assert here.wait(HANG_SECONDS)
        assert thread.ident is not None
        place, *further = describe(current_runtime(), thread.ident).splitlines()
        assert place.startswith(f"rank 0 at {__file__}:")
        assert place.endswith(", in waits_in_a_library: go.wait()  [the script]")
        assert len(further) == 1
        assert further[0].startswith("  rank 0 on host ")
        assert script_place(thread.ident) == place.removeprefix("rank 0 ").partition(": ")[0]
        assert not caplog.records
        with caplog.at_level(logging.DEBUG, "shardwright"):
            describe(current_runtime(), thread.ident)
        (record,) = caplog.records
        assert "rank 0: stack of the script" in record.message
        assert "in _bootstrap" in record.message
    finally:
        go.set()
        thread.join()
    gone = describe(current_runtime(), thread.ident)
    assert gone.startswith("rank 0 at an unknown place\n")
    assert script_place(thread.ident) == "at an unknown place"
