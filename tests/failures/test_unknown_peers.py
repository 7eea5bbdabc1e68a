"""Connections from outside the job are dropped, counted and logged once, while the training goes on exactly."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from shardwright import _core
from shardwright.communication import comm_options
from shardwright.config import load_config
from shardwright.errors import JobStartError

from tests.attack.sieges import while_it_starts
from tests.jobs.job import Job, Process
from tests.jobs.listeners import any_listener_outside, listeners
from tests.jobs.patience import HANG_SECONDS

TOLERANCE = 1e-10
MAGIC = b"SHARDWRT"
HALF_OPEN = 5
MANY = 500
#: Before the second rank comes, and again while it does.
IDLE = 120
#: Sixty-four threads may serve unknown peers at once; each touches a few pages of its stack.
MAX_GROWTH = 32 << 20
GARBAGE = (
    b"\xff" * 64,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    # A hello, and then a frame that is said to be of 2 to the 64 bytes.
    MAGIC + b"\2\0\1\0" + b"\1\0\0\0\2\0\0\0" + b"\0" * 32 + b"\xff" * 4096,
    # Another version of the handshake.
    MAGIC + b"\xff\xff" + b"\0" * 42,
)


def own_port(job: Job, rank: int) -> int:
    """The port on which a rank listens for others of the job, on the loopback interface only."""
    assert not any_listener_outside(job[rank].pid)
    (port,) = {port for _, port in listeners(job[rank].pid)} - {job.port}
    return port


def send_garbage(port: int, garbage: bytes) -> None:
    """Send, and wait until the other side has closed the connection."""
    with socket.create_connection(("127.0.0.1", port), HANG_SECONDS) as stream:
        try:
            stream.sendall(garbage)
            while stream.recv(4096):
                pass
        except ConnectionError:
            pass


def call_with_wrong_secret(port: int) -> None:
    """What a rank started with another secret does."""
    with pytest.raises(JobStartError, match="secret"):
        _core.Node.connect(
            rank=1,
            world=2,
            place=_core.Rendezvous.at("127.0.0.1", port, b"not the secret of the job"),
            fingerprint="",
            version="",
            connect_timeout=HANG_SECONDS,
            liveness_timeout=6.0,
            bind_address="127.0.0.1",
            host_name="unknown",
            options=comm_options(load_config({"transport": "tcp"}, {}, {}), {}, 1, one_host=True),
        )


@pytest.fixture
def training() -> Iterator[Job]:
    with Job("training", arguments=["train for ever"]) as job:
        job.events("step", number=3)
        yield job


def rejected(process: Process) -> int:
    return int(process.events("step")[-1]["strangers"])


def hear_the_challenge(port: int) -> None:
    """Say a hello, which is answered with a challenge, and leave."""
    with socket.create_connection(("127.0.0.1", port), HANG_SECONDS) as stream:
        stream.sendall(MAGIC + b"\2\0\1\0" + b"\0" * 40)
        assert stream.recv(8) == MAGIC


def attack(job: Job, rank: int) -> None:
    """Let all kinds of unknown peers call a rank, and wait until each has been dropped and counted."""
    process, port = job[rank], own_port(job, rank)
    expected = rejected(process)
    hear_the_challenge(port)
    with ExitStack() as half_open:
        for _ in range(HALF_OPEN):
            half_open.enter_context(socket.create_connection(("127.0.0.1", port), HANG_SECONDS))
        for garbage in GARBAGE:
            send_garbage(port, garbage)
        call_with_wrong_secret(port)
    expected += 1 + HALF_OPEN + len(GARBAGE) + 1
    process.wait_for(f"{expected} rejected connections", lambda: rejected(process) >= expected, 20)
    assert rejected(process) == expected


def resident_bytes(process: Process) -> int:
    """The memory that a process holds."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_many_slow_unknown_peers_get_nothing_and_cost_little_memory(training: Job) -> None:
    process, port = training[1], own_port(training, 1)
    hear_the_challenge(port)
    process.wait_for("a rejected connection", lambda: rejected(process) == 1, 20)
    before = resident_bytes(process)
    most = before
    with ExitStack() as stack:
        streams = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), HANG_SECONDS)) for _ in range(MANY)
        ]
        for byte in MAGIC + b"\2\0\1\0" + b"\0" * 36:  # all of a hello but its end, a byte at a time
            for stream in streams:
                with suppress(ConnectionError):  # those beyond the number that may prove themselves are dropped
                    stream.send(bytes([byte]))
            most = max(most, resident_bytes(process))
        process.wait_for(f"{MANY} rejected connections", lambda: rejected(process) >= MANY + 1, 20)
        for stream in streams:
            with suppress(ConnectionResetError):
                assert stream.recv(1) == b""
    assert rejected(process) == MANY + 1
    assert most - before < MAX_GROWTH
    number = len(process.events("step"))
    assert process.event("step", number=number + 5)["error"] < TOLERANCE


def test_unknown_peers_are_dropped_and_counted_and_the_training_goes_on(training: Job) -> None:
    for rank in range(2):
        attack(training, rank)
    numbers = [len(process.events("step")) for process in training.ranks]
    for process, number in zip(training.ranks, numbers, strict=True):
        process.event("step", number=number + 5)
        assert max(step["error"] for step in process.events("step")) < TOLERANCE
        assert process.err.count("dropped an unknown peer's connection") == 1


def test_ranks_start_although_idle_connections_stand_at_the_door() -> None:
    (row,) = while_it_starts("2 ranks", {}, 2 * IDLE)
    assert row.survived == row.attacks >= 2 * IDLE
    assert row.inexact == 0
