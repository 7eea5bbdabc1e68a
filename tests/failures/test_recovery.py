"""A failed step leaves nothing behind: every rank raises, catches, and the next step is exact."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.jobs.job import END_SECONDS, Job
from tests.jobs.patience import slowdown

TOLERANCE = 1e-10
#: Where each failure arises, as the other ranks report it: rank, module, microbatch, phase. The order of backwards
#: depends on which answers come first, so theirs may be any microbatch.
TASKS = {
    "forward on rank 1": (1, "second", 1, "forward"),
    "forward on rank 0": (0, None, 1, "forward"),
    "forward of a child called back": (0, "second.inner", 1, "forward"),
    "backward on rank 1": (1, "second", None, "backward"),
    "backward on rank 0": (0, None, None, "backward"),
    "backward of a child called back": (0, "second.inner", None, "backward"),
    "last backward on rank 0": (0, None, None, "backward"),
    "step function": (0, None, 1, "forward"),
    "step function after its backward": (0, None, 1, "forward"),
}
#: With two replicas of two ranks: the rank that fails, for each replica.
REPLICAS = {
    "forward on rank 1": (1, 3),
    "backward on rank 1": (1, 3),
    "last backward on rank 0": (0, 2),
    "step function": (0, 2),
}


class Outcome:
    """What the ranks of a finished job said."""

    def __init__(self, ranks: int) -> None:
        with Job("recovery", ranks) as job:
            self.codes = job.all_end(100)
            self.host = job[0].event("end")["host"]
            self.failed = [{said["name"]: said for said in process.events("failed")} for process in job.ranks]
            self.exact = [{said["name"]: said["error"] for said in process.events("exact")} for process in job.ranks]

    def failures(self, name: str) -> list[dict[str, Any]]:
        said = [rank[name] for rank in self.failed]
        assert all(each["failure"] for each in said), f"a rank did not fail: {name}"
        return [each["failure"] for each in said]


@pytest.fixture(scope="module")
def pair() -> Outcome:
    return Outcome(2)


@pytest.fixture(scope="module")
def replicas() -> Outcome:
    return Outcome(4)


def check_remote(outcome: Outcome, failure: dict[str, Any], place: tuple[int, str | None, int | None, str]) -> None:
    assert failure["type"] == "RemoteError"
    rank, module, microbatch, phase = place
    assert (failure["rank"], failure["module"], failure["phase"]) == (rank, module, phase)
    assert failure["microbatch"] in (range(4) if microbatch is None else [microbatch])
    assert failure["host"] == outcome.host
    assert failure["kind"] == "ScriptError"
    assert failure["message"] == "deliberate failure"
    assert "in raise_script_error" in failure["traceback"]
    assert failure["traceback"].strip() in failure["text"]


@pytest.mark.parametrize("name", TASKS)
def test_the_raising_rank_raises_its_own_exception_and_the_others_say_where(pair: Outcome, name: str) -> None:
    place = TASKS[name]
    for rank, failure in enumerate(pair.failures(name)):
        if rank == place[0]:
            assert failure["type"] == "ScriptError"
            assert failure["text"] == "deliberate failure"
        else:
            check_remote(pair, failure, place)


@pytest.mark.parametrize("name", TASKS)
def test_the_own_exception_carries_a_note_that_says_where_it_arose(pair: Outcome, name: str) -> None:
    rank, module, microbatch, phase = TASKS[name]
    (note,) = pair.failures(name)[rank]["notes"]
    what = "the step function" if module is None else f"module '{module}'"
    number = r"\d" if microbatch is None else microbatch
    assert re.fullmatch(
        rf"\(rank {rank} on host '{re.escape(pair.host)}', {phase} of {what}, microbatch {number}\)", note
    )


def test_a_batch_that_microbatches_do_not_divide(pair: Outcome) -> None:
    root, peer = pair.failures("indivisible batch")
    assert root["type"] == "ConfigError"
    assert "17 samples" in root["text"]
    assert "4 microbatches" in root["text"]
    assert (peer["type"], peer["rank"], peer["kind"]) == ("RemoteError", 0, "ConfigError")
    assert root["text"] in peer["text"]


def test_an_argument_of_an_unknown_type(pair: Outcome) -> None:
    root, peer = pair.failures("unknown argument")
    assert root["type"] == "UnsupportedValueError"
    assert "Unknown" in root["text"]
    assert "register_type" in root["text"]
    assert (peer["type"], peer["rank"], peer["kind"]) == ("RemoteError", 0, "UnsupportedValueError")
    assert (peer["microbatch"], peer["phase"]) == (1, "forward")


def test_a_result_of_an_unknown_type(pair: Outcome) -> None:
    root, peer = pair.failures("unknown result")
    assert peer["type"] == "UnsupportedValueError"
    assert (root["type"], root["rank"], root["kind"]) == ("RemoteError", 1, "UnsupportedValueError")
    assert (root["module"], root["phase"]) == ("third", "forward")


def test_different_step_functions(pair: Outcome) -> None:
    for failure in pair.failures("different functions"):
        assert failure["type"] == "StepMismatchError"
        assert "common.train" in failure["text"]
        assert "other_function" in failure["text"]
        assert f'rank 1 on host "{pair.host}"' in failure["text"]


def test_a_hook_of_a_parameter_that_fails_when_the_tasks_are_over(pair: Outcome) -> None:
    root, peer = pair.failures("hook of a parameter")
    assert (peer["type"], peer["text"]) == ("ScriptError", "deliberate failure")
    assert (root["type"], root["rank"], root["kind"]) == ("RemoteError", 1, "ScriptError")


@pytest.mark.parametrize("where", ["forward", "signal handler"])
def test_a_shutdown_inside_a_step_is_refused(pair: Outcome, where: str) -> None:
    root, peer = pair.failures(f"shutdown in a {where}")
    assert peer["type"] == "ShardwrightError"
    assert "smp.shutdown was called on rank 1 inside step" in peer["text"]
    assert (root["type"], root["rank"], root["kind"]) == ("RemoteError", 1, "ShardwrightError")


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("name", REPLICAS)
def test_a_failure_in_one_replica_fails_the_other(replicas: Outcome, name: str, replica: int) -> None:
    raising = REPLICAS[name][replica]
    for rank, failure in enumerate(replicas.failures(f"{name}, replica {replica}")):
        if rank == raising:
            assert failure["type"] == "ScriptError"
        else:
            check_remote(replicas, failure, (raising, *TASKS[name][1:]))


@pytest.mark.parametrize("job", ["pair", "replicas"])
def test_every_failure_is_followed_by_an_exact_step(job: str, request: pytest.FixtureRequest) -> None:
    outcome: Outcome = request.getfixturevalue(job)
    assert outcome.codes == [0] * len(outcome.codes)
    for errors, failed in zip(outcome.exact, outcome.failed, strict=True):
        assert len(errors) == len(failed) + 1
        assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


@pytest.mark.parametrize("job", ["pair", "replicas"])
def test_a_failed_step_leaves_weights_gradients_buffers_and_random_numbers_as_they_were(
    job: str, request: pytest.FixtureRequest
) -> None:
    outcome: Outcome = request.getfixturevalue(job)
    for failed in outcome.failed:
        assert [name for name, said in failed.items() if not said["restored"]] == []
        assert [name for name, said in failed.items() if said["live_frames"]] == []


@pytest.mark.parametrize("job", ["pair", "replicas"])
def test_every_rank_raises_in_seconds(job: str, request: pytest.FixtureRequest) -> None:
    outcome: Outcome = request.getfixturevalue(job)
    assert max(said["seconds"] for failed in outcome.failed for said in failed.values()) < END_SECONDS * slowdown()
