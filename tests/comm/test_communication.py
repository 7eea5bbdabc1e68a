"""What is read from the environment about routes, and what ``smp.comm_stats`` tells."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from shardwright import _core
from shardwright.communication import comm_options, ucx_packages
from shardwright.config import load_config
from shardwright.errors import ConfigError, JobStartError
from shardwright.values import decode, pack, registry

from tests.jobs.patience import HANG_SECONDS

WAIT = HANG_SECONDS
ROUTES = ["in_message", "peer_copy", "shared_memory", "host_staged", "tcp"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (True, 256 << 20)),
        ({"SMP_DISABLE_D2D": "", "SMP_D2D_GPU_BUFFER_SIZE_BYTES": " "}, (True, 256 << 20)),
        ({"SMP_DISABLE_D2D": "0"}, (True, 256 << 20)),
        ({"SMP_DISABLE_D2D": "1"}, (False, 256 << 20)),
        ({"SMP_D2D_GPU_BUFFER_SIZE_BYTES": "1"}, (True, 1)),
        ({"SMP_D2D_GPU_BUFFER_SIZE_BYTES": "0"}, (True, 0)),
    ],
)
def test_device_to_device_is_as_the_environment_says(environ: dict[str, str], expected: tuple[bool, int]) -> None:
    enabled, size = expected
    shown = f"device_to_device: {str(enabled).lower()}, device_buffer_bytes: {size},"
    assert shown in repr(comm_options(load_config({}, {}, {}), environ, 1, one_host=True))


@pytest.mark.parametrize("value", ["2", "yes", "true", "-1"])
def test_a_switch_that_is_neither_0_nor_1_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"SMP_DISABLE_D2D is '{value}'; allowed: 0 or 1"):
        comm_options(load_config({}, {}, {}), {"SMP_DISABLE_D2D": value}, 1, one_host=True)


@pytest.mark.parametrize("value", ["-1", "1e6", "64MB", str(1 << 63), "9" * 5000])
def test_a_buffer_size_that_is_no_size_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigError, match=r"SMP_D2D_GPU_BUFFER_SIZE_BYTES is '.*'; allowed: an integer from 0 to"):
        comm_options(load_config({}, {}, {}), {"SMP_D2D_GPU_BUFFER_SIZE_BYTES": value}, 1, one_host=True)


def test_the_core_gets_every_option() -> None:
    cfg = load_config({"transport": "tcp"}, {}, {})
    environ = {"SMP_DISABLE_D2D": "1", "SMP_D2D_GPU_BUFFER_SIZE_BYTES": "4096"}
    assert repr(comm_options(cfg, environ, 1, one_host=True)) == (
        "CommOptions { transport: Tcp, one_host: true, encrypt: false, spin: 300µs, ucx_library: None, "
        f"ucx_packages: {json.dumps(ucx_packages())}, "
        "device_to_device: false, device_buffer_bytes: 4096, cuda_library: None }"
    )


def test_ranks_that_share_processors_look_for_messages_less_long() -> None:
    processors = len(os.sched_getaffinity(0))
    for keys, ranks, shown in (({}, 0, "300µs"), ({}, 1, "50µs"), ({"comm_spin_microseconds": 0}, 1, "0ns")):
        options = comm_options(load_config(keys, {}, {}), {}, processors + ranks, one_host=True)
        assert f"spin: {shown}," in repr(options)


def test_the_counters_of_a_job_of_one_rank_are_there_and_zero() -> None:
    stats = _core.Node.single().comm_stats()
    assert list(stats["routes"]) == ROUTES
    assert not any(count for route in stats["routes"].values() for count in route.values())
    assert (stats["transport"], stats["fallbacks"], stats["peers"]) == ("auto", {}, {})


def connect(
    rank: int, listening: _core.Place, host_names: tuple[str, str], buffer_bytes: int, *, transport: str, **keys: Any
) -> Any:
    return _core.Node.connect(
        rank=rank,
        world=2,
        place=listening if rank == 0 else _core.Rendezvous.at("127.0.0.1", listening.port, b"the secret of the test"),
        fingerprint="",
        version="1",
        connect_timeout=WAIT,
        liveness_timeout=WAIT,
        bind_address="127.0.0.1",
        host_name=host_names[rank],
        buffer_bytes=0 if transport == "tcp" else buffer_bytes,
        options=comm_options(load_config({"transport": transport, **keys}, {}, {}), {}, 2, one_host=True),
    )


#: Where no UCX is.
NOWHERE = {"ucx_library": "/nowhere/libucp.so.0"}


@pytest.mark.parametrize(
    ("keys", "buffer_bytes", "host_names", "route", "reason"),
    [
        ({"transport": "tcp"}, 64 << 20, ("a", "a"), "tcp", "configured"),
        ({"transport": "shared_memory"}, 1 << 20, ("a", "a"), "tcp", "source_host_full"),
        ({"transport": "shared_memory"}, 64 << 20, ("a", "b"), "tcp", "configured"),
        ({"transport": "auto"}, 1 << 20, ("a", "a"), "host_staged", "source_host_full"),
        ({"transport": "auto"}, 64 << 20, ("a", "b"), "host_staged", None),
        ({"transport": "auto", **NOWHERE}, 64 << 20, ("a", "b"), "tcp", "no_ucx"),
    ],
)
def test_tensors_that_cannot_be_shared_are_counted_with_the_reason(
    keys: dict[str, str], buffer_bytes: int, host_names: tuple[str, str], route: str, reason: str | None
) -> None:
    listening = _core.Rendezvous.listen("127.0.0.1", b"the secret of the test")
    with ThreadPoolExecutor(2) as pool:
        nodes = list(pool.map(lambda rank: connect(rank, listening, host_names, buffer_bytes, **keys), range(2)))
    try:
        value = [torch.zeros(10), torch.zeros(20), torch.zeros(1 << 20)]
        spec, tensors = _core.flatten(value, registry)
        nodes[0].send_object(1, "c", spec, pack(tensors, [False] * 3))
        assert nodes[1].recv_object(0, "c", WAIT) is not None
        sent, received = (node.comm_stats() for node in nodes)
        totals = nodes[0].stats()
    finally:
        for node in nodes:
            node.close()
    assert sent["transport"] == keys["transport"]
    for name, number, size in (("in_message", 2, 120), (route, 1, 4 << 20)):
        counts = {"tensors_sent": number, "tensors_received": 0, "bytes_sent": size, "bytes_received": 0}
        assert sent["routes"][name] == counts
        counts = {"tensors_sent": 0, "tensors_received": number, "bytes_sent": 0, "bytes_received": size}
        assert received["routes"][name] == counts
    assert {name: fallback["tensors"] for name, fallback in sent["fallbacks"].items()} == (
        {reason: 1} if reason else {}
    )
    assert received["fallbacks"] == {}
    carrier = "UCX" if route == "host_staged" else "tcp"
    assert sent["peers"] == {1: {"host": host_names[1], "reached_by": carrier, "devices": "not used"}}
    assert (totals["messages_sent"], sent["messages_sent"]) == (1, 1)


@pytest.mark.parametrize("host_names", [("a", "a"), ("a", "b")])
def test_ucx_carries_objects_whose_waiting_threads_receive_them(host_names: tuple[str, str]) -> None:
    listening = _core.Rendezvous.listen("127.0.0.1", b"the secret of the test")
    with ThreadPoolExecutor(2) as pool:
        nodes = list(pool.map(lambda rank: connect(rank, listening, host_names, 64 << 20, transport="ucx"), range(2)))
        try:
            values = [[index, torch.full((size,), float(index))] for index, size in enumerate([0, 10, 5000, 1 << 20])]

            def exchange(rank: int) -> list[Any]:
                received = []
                for value in values:
                    spec, tensors = _core.flatten(value, registry)
                    nodes[rank].send_object(1 - rank, "c", spec, pack(tensors, [False]))
                    came = nodes[rank].recv_object(1 - rank, "c", WAIT)
                    assert came is not None
                    received.append(decode(*came))
                return received

            for received in pool.map(exchange, range(2)):
                for (number, tensor), (expected, whole) in zip(received, values, strict=True):
                    assert number == expected
                    assert torch.equal(tensor, whole)
            stats = [node.comm_stats() for node in nodes]
        finally:
            list(pool.map(lambda node: node.close(), nodes))
    assert stats[0]["peers"] == {1: {"host": host_names[1], "reached_by": "UCX", "devices": "not used"}}
    # Both ranks are in one process, whose tensors lie in the buffer of the one that connected last; the other copies
    # them into its own.
    shared = sum(one["routes"]["shared_memory"]["tensors_sent"] for one in stats)
    assert shared == (4 if host_names[0] == host_names[1] else 0)


def test_a_ucx_that_is_not_there_is_told_with_the_place() -> None:
    listening = _core.Rendezvous.listen("127.0.0.1", b"the secret of the test")
    with pytest.raises(JobStartError, match=r"cannot use UCX.*/nowhere/libucp"):
        connect(0, listening, ("a", "a"), 0, transport="ucx", **NOWHERE)
