"""Tensors go from device to device between processes: on GPUs, and on a stand-in for their driver."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.device.rehearsal import build_rehearsal
from tests.jobs.forked import Forked

JOB = Path(__file__).with_name("transfer_job.py")
WAIT = 120.0


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
    check(finish(start_pair(rehearsal, 60)), 60)


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
