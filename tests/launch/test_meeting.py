"""Ranks of several hosts meet at the address of their own rank 0, and not at that of a job before a restart."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from shardwright._core import LaunchInfo
from shardwright.errors import JobStartError
from shardwright.rendezvous import LOOPBACK, _where_rank_0_listens
from torch._C._distributed_c10d import HashStore

LAUNCH = LaunchInfo.detect(
    {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "node-0",
        "MASTER_PORT": "5000",
    }
)


def gone() -> str:
    """An address at which somebody has listened."""
    with socket.create_server((LOOPBACK, 0)) as server:
        return f"{LOOPBACK}:{server.getsockname()[1]}/before"


def test_an_address_from_before_a_restart_is_passed_over() -> None:
    store = HashStore()
    store.set("address", gone())
    with socket.create_server((LOOPBACK, 0)) as server:
        now = f"{LOOPBACK}:{server.getsockname()[1]}/now"
        later = threading.Timer(0.3, store.set, ("address", now))
        later.start()
        assert _where_rank_0_listens(LAUNCH, store, time.monotonic() + 30.0) == now
        later.join()


def test_a_rank_0_that_never_comes_is_an_error() -> None:
    store = HashStore()
    store.set("address", gone())
    with pytest.raises(JobStartError, match=r"rank 1 waited \d+\.\d s for rank 0, which did not start"):
        _where_rank_0_listens(LAUNCH, store, time.monotonic() + 0.2)
