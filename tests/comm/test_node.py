"""The connection as Python sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from shardwright import _core, logs
from shardwright.communication import comm_options
from shardwright.config import load_config
from shardwright.errors import JobStartError, PeerLostError, ShardwrightError
from shardwright.values import pack, registry, unpack

from tests.jobs.forked import Forked
from tests.jobs.patience import HANG_SECONDS

WAIT = HANG_SECONDS
SECRET = b"the secret of the test"
OVER_TCP = comm_options(load_config({"transport": "tcp"}, {}, {}), {}, 1, one_host=True)


def connect(rank: int, world: int, listening: _core.Place, **changed: Any) -> Any:
    options: dict[str, Any] = {
        "rank": rank,
        "world": world,
        "place": listening if rank == 0 else _core.Rendezvous.at("127.0.0.1", listening.port, SECRET),
        "fingerprint": "seed=1",
        "version": "1",
        "connect_timeout": WAIT,
        "liveness_timeout": WAIT,
        "bind_address": "127.0.0.1",
        "host_name": f"host-{rank}",
        "options": OVER_TCP,
    }
    return _core.Node.connect(**{**options, **changed})


def job(world: int) -> list[Any]:
    listening = _core.Rendezvous.listen("127.0.0.1", SECRET)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: connect(rank, world, listening), range(world)))


@pytest.fixture(params=["tcp", "in process"])
def nodes(request: pytest.FixtureRequest) -> Any:
    made = job(2) if request.param == "tcp" else _core.Node.in_process(2)
    yield made
    for node in made:
        node.close()


def send(node: Any, to: int, value: Any, channel: str = "c") -> None:
    spec, tensors = _core.flatten(value, registry)
    node.send_object(to, channel, spec, pack(tensors, [False] * len(tensors)))


def receive(node: Any, source: int, channel: str = "c") -> Any:
    received = node.recv_object(source, channel, WAIT)
    assert received is not None
    spec, parts = received
    return spec.build(unpack(parts), registry)


def test_objects_arrive_with_their_tensors(nodes: Any) -> None:
    tensor = torch.randn(3, 4).t()
    send(nodes[0], 1, {"a": tensor, "b": [tensor, None, 1.5]})
    received = receive(nodes[1], 0)
    assert torch.equal(received["a"], tensor)
    assert received["b"] == [received["a"], None, 1.5]
    assert received["b"][0] is received["a"]
    assert nodes[0].stats()["messages_sent"] == 1
    assert nodes[1].stats()["messages_received"] == 1


def test_nothing_received_is_none(nodes: Any) -> None:
    assert nodes[0].recv_object(1, "c", 0.01) is None


def test_a_barrier_holds_until_all_have_come(nodes: Any) -> None:
    passed = threading.Event()

    def first() -> None:
        nodes[0].barrier([0, 1], "b", WAIT)
        passed.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert not passed.wait(0.05)
    nodes[1].barrier([0, 1], "b", WAIT)
    thread.join(WAIT)
    assert passed.is_set()


def test_waiting_lets_other_threads_run_and_ends_with_the_peer(nodes: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receive, nodes[0], 1)
        nodes[1].close({"kind": "ValueError", "message": "no luck", "traceback": "the trace"})
        error = waiting.exception(WAIT)
    assert isinstance(error, PeerLostError)
    assert (error.rank, error.kind, error.message, error.traceback) == (1, "ValueError", "no luck", "the trace")
    assert error.host in ("host-1", "localhost")
    with pytest.raises(PeerLostError):
        send(nodes[0], 1, None)


def test_ranks_that_differ_say_in_what() -> None:
    listening = _core.Rendezvous.listen("127.0.0.1", SECRET)
    with ThreadPoolExecutor(2) as pool:
        prints = [f"seed=1\nmicrobatches={4 + rank}" for rank in range(2)]
        starts = [pool.submit(connect, rank, 2, listening, fingerprint=prints[rank]) for rank in range(2)]
        errors = [start.exception(WAIT) for start in starts]
    for error in errors:
        assert isinstance(error, JobStartError)
        assert "rank 0 has microbatches=4; rank 1 has microbatches=5" in str(error)


def test_a_forked_child_leaves_the_connection_alone() -> None:
    nodes = job(2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            nodes[0].recv_object(1, "c", WAIT)
        except ShardwrightError as error:
            code = 0 if "was forked" in str(error) else 2
        try:
            send(nodes[0], 1, "from the child")
            code = 3
        except ShardwrightError:
            pass
        nodes[0].close()
        del nodes[:]
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    send(nodes[0], 1, "from the parent")
    assert receive(nodes[1], 0) == "from the parent"
    for node in nodes:
        node.close()


def test_a_single_node_has_nobody_to_talk_to() -> None:
    node = _core.Node.single()
    assert (node.rank, node.world) == (0, 1)
    with pytest.raises(ShardwrightError, match="not a peer"):
        send(node, 0, None)
    node.barrier([0], "alone")
    node.close()
    node.close()


@pytest.mark.parametrize("wait", ["node.recv_object(1, 'c', 1e5)", "node.barrier([0, 1], 'b')", "start()"])
def test_an_interrupt_ends_every_wait(wait: str) -> None:
    script = f"""
import sys
from shardwright import _core, logs
from shardwright.communication import comm_options
from shardwright.config import load_config

def start():
    listening = _core.Rendezvous.listen("127.0.0.1", b"the secret of the test")
    options = comm_options(load_config({{}}, {{}}, {{}}), {{}}, 1, one_host=True)
    _core.Node.connect(rank=0, world=2, place=listening, fingerprint="", version="", connect_timeout=1e5,
                       liveness_timeout=60.0, bind_address=None, host_name="h", options=options)

nodes = _core.Node.in_process(2)
node = nodes[0]
try:
    print("ready", flush=True)
    {wait}
except KeyboardInterrupt:
    sys.exit(7)
"""
    process = Forked(["-c", script], os.environ)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 7
    finally:
        process.kill()


def test_an_unknown_peer_is_counted_and_the_first_one_logged(caplog: pytest.LogCaptureFixture) -> None:
    logs.forward()
    caplog.clear()
    listening = _core.Rendezvous.listen("127.0.0.1", SECRET)
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(connect, rank, 2, listening) for rank in range(2)]
        nodes = [start.result(WAIT) for start in starts]
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", listening.port), WAIT) as unknown:
            unknown.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert unknown.recv(1) == b""
    assert nodes[0].stats()["unknown_peers_dropped"] == 3
    logs.forward()
    warnings = [record.getMessage() for record in caplog.records if record.name == "shardwright"]
    assert len(warnings) == 1
    assert "dropped an unknown peer's connection" in warnings[0]
    send(nodes[0], 1, "still here")
    assert receive(nodes[1], 0) == "still here"
    for node in nodes:
        node.close()
