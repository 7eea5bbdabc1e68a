"""Objects between the processes of a job: whatever they hold, in whatever order and from whatever thread."""

from __future__ import annotations

import ast
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import shardwright as smp
import torch
from shardwright.errors import ConfigError
from shardwright.job.ranks import global_rank

from tests.jobs.job import Job
from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).parent / "programs" / "objects.py"
ENDING = PROGRAM.with_name("objects_that_end.py")


def scenarios() -> list[str]:
    """The functions that the program lists, without importing it: it registers types."""
    tree = ast.parse(PROGRAM.read_text())
    listed = [node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "SCENARIOS"]
    return [element.id for element in listed[0].value.elts]


@pytest.fixture(scope="module")
def passed() -> list[list[str]]:
    """By rank, the scenarios that hold."""
    return [output.split() for output in outputs_of_ranks(PROGRAM, ranks=4)]


@pytest.mark.parametrize("scenario", scenarios())
def test_objects(passed: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in passed)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a job of one rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    smp.init({})
    yield
    smp.shutdown()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: smp.allgather(1, "X"), r"group is 'X'; allowed: smp\.WORLD, smp\.MP_GROUP, "),
        (lambda: smp.barrier(5), r"group is 5; allowed: smp\.WORLD"),
        (lambda: smp.broadcast(1, None), r"group is None; allowed: smp\.WORLD"),
        (lambda: smp.send(1, 0, "WORLD_RANK"), r"rank_type is 'WORLD_RANK'; allowed: smp\.RankType\.WORLD_RANK, "),
        (lambda: smp.recv_from(0, smp.WORLD), r"rank_type is <CommGroup\.WORLD: 'WORLD'>; allowed: "),
        (lambda: smp.send(1, "0", smp.RankType.WORLD_RANK), r"dest_rank is '0', a str; allowed: an integer"),
        (lambda: smp.send(1, True, smp.RankType.PP_RANK), r"dest_rank is True, a bool; allowed: an integer"),
        (lambda: smp.recv_from(0.0, smp.RankType.PP_RANK), r"src_rank is 0\.0, a float; allowed: an integer"),
    ],
)
def test_an_argument_that_is_no_rank_or_group_is_refused_by_name(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("zero", [0, numpy.int64(0), torch.tensor(0)])
def test_whole_numbers_of_any_type_are_ranks(zero: int) -> None:
    for rank_type in smp.RankType:
        rank = global_rank(zero, rank_type)
        assert (rank, type(rank)) == (0, int)


def test_who_waits_for_a_dead_rank_or_sends_to_it_is_told() -> None:
    with Job(str(ENDING.with_suffix("")), 3, ["lost"]) as job:
        job[2].wait(HANG_SECONDS)
        job.all_end_with([0, 0, -signal.SIGKILL], limit=30.0)
        said = (job[0].out + job[1].out).splitlines()
    assert [line.partition(":")[0] for line in said] == ["waiting", "sending", "broadcast", "gather", "barrier"]
    for line in said:
        # Rank 1 may not know of it yet when it sends.
        assert "PeerLostError: rank 2 on host " in line or line == "broadcast: nothing", line


def test_who_waits_in_a_gather_for_one_rank_is_told_of_the_death_of_another() -> None:
    with Job(str(ENDING.with_suffix("")), 3, ["gathering"]) as job:
        job[2].wait(HANG_SECONDS)
        job.all_end_with([0, 0, -signal.SIGKILL])
        assert "gather: PeerLostError: rank 2 on host " in job[1].out


@pytest.mark.slow  # some ten seconds on a small machine
def test_more_objects_than_may_wait_are_an_error_after_those_that_had_room() -> None:
    (text, _) = outputs_of_ranks(ENDING, "overflow")
    assert "more than 65536 objects (or 68719476736 bytes of them) from rank 1 wait without being received" in text
    assert 'no room for one on channel "objects"' in text


@pytest.mark.slow  # 2 GiB of memory, and half a minute on a small machine
def test_an_object_of_a_gibibyte_takes_one_copy_at_each_end() -> None:
    assert outputs_of_ranks(ENDING, "large") == ["done\n", "done\n"]
