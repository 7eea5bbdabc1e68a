"""Weight gradients that are left for later and fail when the root has ended its part: the step fails on all ranks."""

from __future__ import annotations

from tests.jobs.job import Job

TOLERANCE = 1e-10


def test_weight_gradients_that_fail_when_the_root_only_waits_for_votes() -> None:
    with Job("late_weights", 2) as job:
        assert job.all_end(60) == [0, 0]
        root, peer = job.ranks
        votes = {said["step"]: said["at"] for said in root.events("votes")}
        (raises,) = peer.events("raises")
        # The root had voted for the step when it failed; rank 1 never did.
        assert votes[2] < raises["at"]
        assert 2 not in {said["step"] for said in peer.events("votes")}
        failures = [process.event("failed") for process in job.ranks]
        assert failures[1]["weight_gradients"] > 0
        assert (failures[1]["failure"]["type"], failures[1]["failure"]["text"]) == ("ScriptError", "deliberate failure")
        told = failures[0]["failure"]
        assert (told["type"], told["rank"], told["kind"]) == ("RemoteError", 1, "ScriptError")
        assert [failure["restored"] for failure in failures] == [True, True]
        for process in job.ranks:
            assert [said["error"] < TOLERANCE for said in process.events("exact")] == [True, True]
