"""A choice of faults in which every fault meets every layout and every moment, and every moment every layout."""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterable
from pathlib import Path

import pytest

from tests.covering import covering
from tests.faults.cases import SAVING, Case, all_cases
from tests.faults.runner import START_SECONDS, TOLERANCE, Outcome, Session, run, run_short
from tests.jobs.patience import HANG_SECONDS, slowdown

WORKERS = 2
#: How long the slowest rank may take to raise where nobody has to be waited for; on an idle machine.
SLOWEST_SECONDS = 3.0


def pairs(case: Case) -> Iterable[Hashable]:
    """What meets in a case."""
    values = (("layout", case.layout), ("fault", case.fault), ("moment", case.moment))
    return itertools.combinations(values, 2)


#: Saves in the background are in `tests/checkpoint/test_background.py`.
CASES = [case for case in all_cases() if case.moment not in SAVING]
CHOSEN = [case for case in covering(CASES, pairs) if case.fault != "stop for ever"]


@pytest.fixture(scope="module")
def outcomes() -> dict[Case, str]:
    """What is wrong, by case."""
    found, allowed = {}, {}

    def measure(outcome: Outcome) -> None:
        allowed[outcome.case] = SLOWEST_SECONDS * slowdown()

    for one in run(CHOSEN, WORKERS, measure):
        slow = one.seconds is not None and one.seconds >= allowed[one.case] and not one.case.waits_by_contract
        found[one.case] = one.note or ("nothing that is known" if one.is_bad else f"{one.seconds} s" if slow else "")
    return found


def test_the_choice_is_of_every_fault() -> None:
    assert {case.fault for case in CHOSEN} == {case.fault for case in CASES} - {"stop for ever"}


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_a_fault_is_named_on_every_rank_and_the_next_step_is_exact(outcomes: dict[Case, str], case: Case) -> None:
    assert outcomes[case] == ""


@pytest.mark.parametrize("layout", ["pp2", "pp4", "dp2"])
def test_a_job_whose_ranks_have_little_address_space_starts_or_is_refused_by_name(layout: str) -> None:
    outcome = run_short(Case(layout, "600 MB of address space more", "start", -1, starts=True))
    assert not outcome.is_bad, outcome.note


NO_ROOM = [("pp2", -1, "1.5 GB"), ("pp4", -1, "1.5 GB"), ("pp2", 0, "2.7 GB"), ("pp2", 1, "2.7 GB")]


@pytest.mark.parametrize(("layout", "rank", "more"), NO_ROOM)
def test_where_a_rank_has_no_room_for_ucx_its_buffer_is_smaller_and_all_reach_each_other_by_tcp(
    layout: str, rank: int, more: str
) -> None:
    """More than what Python and torch take: enough for connections and small buffers, and for one of usual size."""
    case = Case(layout, f"{more} of address space more", "start", rank, starts=True)
    with Session(layout, case, connect_timeout_seconds=HANG_SECONDS) as session:
        session.start()
        said = session.all("exact", START_SECONDS, 0)
        buffers = [buffer_bytes(process.pid) for process in session.job.ranks]
    for own, each in enumerate(said):
        assert each["error"] < TOLERANCE
        assert len(each["peers"]) == case.world - 1
        for peer, found in each["peers"].items():
            assert found["reached_by"] == "tcp", (own, peer)
        assert buffers[own] < 1 << 30 if rank in (-1, own) else buffers[own] > 1 << 30


def buffer_bytes(pid: int) -> int:
    """The size of the largest buffer for tensors that a process has, with its head."""
    files = [
        entry for entry in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(entry).startswith("/memfd:shardwright")
    ]
    return max((file.stat().st_size for file in files), default=0)
