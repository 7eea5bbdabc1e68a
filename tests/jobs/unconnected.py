"""A runtime without a connection, for tests of what stands on one."""

from __future__ import annotations

from typing import Any

from shardwright import _core
from shardwright.config import load_config
from shardwright.job.place import Place
from shardwright.job.runtime import Runtime
from shardwright.launch import LaunchInfo
from shardwright.start import add_parts


def unconnected_runtime(
    rank: int = 0, num_ranks: int = 1, *, node: Any = None, server: Any = None, pp_size: int = 1, **config: Any
) -> Runtime:
    """One rank of several, which sends nothing; with another node or server where a test has one of its own."""
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
        job_id="unconnected",
    )
    runtime = Runtime(Place(cfg, _core.Topology(num_ranks, pp_size, 1, "cluster"), launch), node, server)
    add_parts(runtime)
    return runtime
