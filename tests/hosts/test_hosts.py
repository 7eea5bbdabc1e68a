"""Training over four hosts with slow links: exact, and with an error that names rank and host when a link is cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.jobs.job import Job, Process
from tests.jobs.patience import HANG_SECONDS

from .network import LINK, Network, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

HOSTS = 4
DELAY_MILLISECONDS = 20.0
TOLERANCE = 1e-10
#: A step over a line of 20 ms takes a second, on a machine that has other things to do.
STEP_SECONDS = 90.0
SECRET = {"SHARDWRIGHT_SECRET": "of the rehearsal"}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(HOSTS, rate="1gbit", delay_milliseconds=DELAY_MILLISECONDS) as made:
        yield made


def training(network: Network, secret: Mapping[str, str] = SECRET, **keys: Any) -> Job:
    """Pipeline degree 2 by data degree 2, a rank on each host, each step compared with one process."""

    def launch(rank: int, world: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": LINK,
        }

    arguments = ["train for ever", json.dumps({"ddp": True, **keys})]
    return Job("training", HOSTS, arguments, lambda rank: secret, launch=launch, prefix=network.prefix)


def steps(process: Process, number: int) -> list[dict[str, Any]]:
    """The first ``number`` steps."""
    process.event("step", STEP_SECONDS, number - 1)
    return process.events("step")[:number]


def last_loss(process: Process) -> str:
    """The error that ended a process."""
    lines = [line for line in process.err.splitlines() if "PeerLostError: rank" in line]
    assert lines, process.err
    return lines[-1].partition("PeerLostError: ")[2]


def test_packets_take_their_time(network: Network) -> None:
    # Nobody listens there, so that the answer takes a packet there and one back.
    program = f"""
import socket, time
began = time.monotonic()
assert socket.socket().connect_ex(("{network.address(1)}", 9)) != 0
print(time.monotonic() - began, socket.gethostname())
"""
    command = [*network.prefix(0), sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    seconds, host = done.stdout.split()
    assert 2 * DELAY_MILLISECONDS / 1000 <= float(seconds) < 1
    assert host == "node-0"


def test_training_over_slow_links_is_exact(network: Network) -> None:
    with training(network) as job:
        for process in job.ranks:
            done = steps(process, 4)
            assert max(step["error"] for step in done) < TOLERANCE
            # Activations go to the next stage, and gradients come back.
            assert done[-1]["at"] - done[-2]["at"] > 2 * DELAY_MILLISECONDS / 1000


def test_a_link_cut_in_a_step_ends_every_rank_with_the_rank_and_host_behind_it(network: Network) -> None:
    liveness = 4
    with training(network, liveness_timeout_seconds=liveness) as job:
        for process in job.ranks:
            steps(process, 2)
        network.cut(3)
        try:
            began = time.monotonic()
            codes = job.all_end(4 * liveness + 10.0)
            seconds = time.monotonic() - began
        finally:
            network.restore(3)
        assert all(code != 0 for code in codes)
        for rank in (0, 1, 2):
            text = last_loss(job[rank])
            assert text.startswith("rank 3 on host 'node-3'"), text
            assert "has been silent" in text
        assert last_loss(job[3]).startswith("rank "), job[3].err
        assert " on host 'node-" in last_loss(job[3])
    assert seconds < 4 * liveness + 10.0


def test_a_link_cut_for_less_than_the_liveness_timeout_changes_nothing(network: Network) -> None:
    with training(network, liveness_timeout_seconds=20) as job:
        for process in job.ranks:
            steps(process, 2)
        network.cut(2)
        try:
            # How long the link is cut is the test's subject.
            time.sleep(3.0)
        finally:
            network.restore(2)
        numbers = [len(process.events("step")) for process in job.ranks]
        for process, number in zip(job.ranks, numbers, strict=True):
            assert max(step["error"] for step in steps(process, number + 4)) < TOLERANCE


def test_several_hosts_without_a_secret_are_refused(network: Network) -> None:
    assert "SHARDWRIGHT_SECRET" not in os.environ
    with training(network, secret={}) as job:
        assert all(code == 1 for code in job.all_end(60.0))
        for process in job.ranks:
            assert "the job spans several hosts but has no secret" in process.err
