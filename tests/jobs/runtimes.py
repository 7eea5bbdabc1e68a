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
    launch = LaunchInfo(
        launcher="environment",
        rank=rank,
        world_size=num_ranks,
        local_rank=rank,
        local_size=num_ranks,
        rendezvous_host=None,
        rendezvous_port=None,
        single_host=True,
        job_id="tests",
    )
    runtime = Runtime(Place(cfg, _core.Topology(num_ranks, pp_size, 1, "cluster"), launch), node, server)
    add_parts(runtime)
    return runtime
