"""``smp.stats`` and ``smp.report``: what a rank and the whole job have done so far, in numbers."""

from __future__ import annotations

from typing import Any

from shardwright.objects import allgather
from shardwright.ranks import WORLD
from shardwright.runtime import current_runtime


def stats() -> dict[str, Any]:
    """Counts of this rank since ``smp.init``; sizes are in bytes.

    Returns:
        Steps, remote requests sent and served by direction, live frames, frames that no request closed, bytes of
        parameters, buffers and gradients held here, and messages and bytes sent and received.
    """
    runtime = current_runtime()
    parameters = [p for placement in runtime.placements for p in placement.owned_parameters()]
    buffers = [m._buffers[name] for placement in runtime.placements for m, name in placement.owned_buffers()]
    return {
        "steps": runtime.step,
        "rank": runtime.rank,
        "pipeline_parallel_degree": runtime.pp_size,
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in buffers if b is not None),
        "gradient_bytes": sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None),
        "live_frames": len(runtime.frames),
        "unclosed_frames": runtime.unclosed_frames,
        "server": runtime.server.stats(),
        "communication": runtime.node.stats(),
    }


def report() -> dict[str, Any]:
    """The job in a few numbers, the same on every rank; called by all ranks, between steps.

    Returns:
        The number of ranks, the pipeline degree, the bytes of parameters that each rank holds, and the forward and
        backward requests that crossed ranks since ``smp.init``.
    """
    runtime = current_runtime()
    own = stats()
    sent = own["server"]["total"]["sent"]
    ranks = allgather((own["parameter_bytes"], sent["forward"] + sent["backward"]), WORLD)
    return {
        "ranks": len(ranks),
        "pipeline_parallel_degree": runtime.pp_size,
        "parameter_bytes_per_rank": [parameter_bytes for parameter_bytes, _ in ranks],
        "remote_requests": sum(requests for _, requests in ranks),
    }
