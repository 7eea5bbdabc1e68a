"""Runtimes of ranks that are no processes of their own."""

from __future__ import annotations

from typing import Any

from shardwright import _core
from shardwright._core import LaunchInfo
from shardwright.config import load_config
from shardwright.job.place import Place
from shardwright.job.runtime import Runtime
from shardwright.start import add_parts


def make_runtime(
    rank: int = 0, num_ranks: int = 1, *, node: Any = None, server: Any = None, pp_size: int = 1, **config: Any
) -> Runtime:
    """One rank of several, over the node and server that a test gives it; without them it sends nothing."""
    cfg = load_config({"pipeline_parallel_degree": pp_size, **config}, {}, {})
    ranks = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    launch = LaunchInfo.detect({**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    runtime = Runtime(Place(cfg, _core.Topology(num_ranks, pp_size, 1, "cluster"), launch), node, server)
    add_parts(runtime)
    return runtime
