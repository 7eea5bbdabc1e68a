"""Tensors go from device to device between processes: on GPUs, and on a stand-in for their driver."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.built import build_rehearsal
from tests.jobs.forked import Forked
from tests.jobs.patience import HANG_SECONDS

JOB = Path(__file__).with_name("transfer_job.py")
WAIT = HANG_SECONDS


@pytest.fixture(scope="session")
def rehearsal() -> str:
    """The stand-in for CUDA's driver."""
    return build_rehearsal()


def start(rank: int, port: str, library: str, rounds: int, **environment: str) -> Forked:
    return Forked([str(JOB), str(rank), port, library, str(rounds)], {**os.environ, **environment})


def start_pair(library: str, rounds: int, **environment: str) -> list[Forked]:
    """Both ranks; what is in the environment is rank 0's."""
    first = start(0, "0", library, rounds, **environment)
    assert first.stdout is not None
    return [first, start(1, first.stdout.readline().strip(), library, rounds)]


def finish(ranks: list[Forked]) -> list[dict[str, Any]]:
    results = []
    for rank in ranks:
        output, errors = rank.communicate(timeout=WAIT)
        assert rank.returncode == 0, errors
        results.append(json.loads(output.splitlines()[-1]))
    return results


def check(results: list[dict[str, Any]], rounds: int) -> None:
    """Most large tensors were copied from device to device; before both ends had opened the buffers, staged."""
    for sent, received in (results, results[::-1]):
        routes, others = sent["routes"], received["routes"]
        assert routes["in_message"]["tensors_sent"] == rounds
        copies, staged = routes["peer_copy"]["tensors_sent"], routes["shared_memory"]["tensors_sent"]
        assert copies + staged == 2 * rounds
        assert copies >= rounds
        assert others["peer_copy"]["tensors_received"] == copies
        assert sent["fallbacks"].get("no_peer_access", {"tensors": 0})["tensors"] == staged


def test_devices_copy_from_each_other_across_processes(rehearsal: str) -> None:
    results = finish(start_pair(rehearsal, 60))
    check(results, 60)
    for result in results:
        assert result["devices"] == "the same device"
        assert result["left"] == 0, "streams, events and memory are given back"
        assert result["said"] == []
        # Both ranks' buffers are of 64 MiB: what is locked is a part of one.
        assert 0 < result["locked"] <= 32 << 20


def test_ranks_of_one_host_try_to_open_each_others_memory_before_any_tensor_is_sent(rehearsal: str) -> None:
    for result in finish(start_pair(rehearsal, 0)):
        assert result["devices"] == "the same device"
        assert result["locked"] == 0, "no host memory is locked before it is needed"
        assert result["left"] == 0


def test_memory_that_cannot_be_opened_is_said_and_both_ranks_agree_on_host_memory(rehearsal: str) -> None:
    """As with one visible device for each rank, or parts of one (MIG)."""
    first, second = finish(start_pair(rehearsal, 60, REHEARSAL_IPC="refused"))
    reason = "cuIpcOpenMemHandle failed: CUDA_ERROR_INVALID_DEVICE (101)"
    assert first["devices"] == f"its memory cannot be opened here: {reason}"
    assert second["devices"] == "this rank's memory cannot be opened there"
    (warning,) = first["said"]
    assert "cannot be opened; tensors between both devices go through host memory" in warning
    assert reason in warning
    # What the first rank cannot open, the second does not send by that way; the other direction is as it was.
    assert second["routes"]["peer_copy"]["tensors_sent"] == 0
    assert second["routes"]["shared_memory"]["tensors_sent"] == 120
    assert second["fallbacks"]["no_peer_access"]["tensors"] == 120
    assert first["routes"]["peer_copy"]["tensors_sent"] >= 60
    assert first["left"] == second["left"] == 0


@pytest.mark.gpu
def test_gpus_copy_from_each_other_across_processes() -> None:
    check(finish(start_pair("", 60)), 60)


def test_a_device_that_fails_ends_both_ranks_with_its_error(rehearsal: str) -> None:
    ranks = start_pair(rehearsal, 60, REHEARSAL_FAIL_AFTER="70")
    errors = [rank.communicate(timeout=WAIT)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], errors
    # Whether a message waits for the device or the next tensor finds it failed is a matter of time.
    assert re.search("CUDA_ERROR_LAUNCH_FAILED|the device takes no tensors", errors[0]), errors[0]
    assert "PeerLostError" in errors[1], errors[1]


def test_the_death_of_a_peer_leaves_no_rank_waiting_for_its_device(rehearsal: str) -> None:
    ranks = start_pair(rehearsal, 1_000_000)
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "joined\n"
        ranks[1].kill()
        errors = ranks[0].communicate(timeout=WAIT)[1]
        assert ranks[0].returncode == 1
        assert "rank 1" in errors
        assert "PeerLostError" in errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
