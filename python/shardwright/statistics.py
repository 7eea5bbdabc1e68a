"""``smp.stats``, ``smp.report`` and ``smp.comm_stats``: what a rank and the whole job have done so far, in numbers."""

from __future__ import annotations

from typing import Any

from shardwright.execution.frame_table import FrameTable
from shardwright.execution.state_order import StateOrder
from shardwright.job.objects import gathered
from shardwright.job.ranks import WORLD
from shardwright.job.runtime import current_runtime
from shardwright.model.models import Models
from shardwright.scheduling import Scheduling


def stats() -> dict[str, Any]:
    """Counts of this rank since ``smp.init``; sizes are in bytes.

    Returns:
        Steps, remote requests sent and served by direction, live frames, frames that no request closed, bytes of
        parameters, buffers and gradients held here, messages and bytes sent and received, and under ``efficiency``
        where the time inside steps went: of all steps but those that divided a model (``total``), and of the newest
        one (``step``). ``busy`` and ``waiting`` are shares of that time; ``waiting_seconds`` is by the global rank
        whose message ended the wait; ``bubble`` is the share of the tasks' time in which no task ran,
        ``ideal_bubble`` what the schedule would leave if all ranks cost the same and nothing else cost time, None
        where that is not known. ``schedule`` is the text of the pipeline's schedule, and ``schedule_decision`` what
        ``"pipeline": "auto"`` has chosen it by: the first step that ran with it, the steps that were measured, their
        mean seconds, and by candidate the simulated seconds of a step's tasks; None without a choice. ``departures``
        counts the steps that static mode ran again because a module gave something else than before.
    """
    runtime = current_runtime()
    total, newest = runtime.usage()
    parameters = [p for placement in runtime[Models].placements for p in placement.owned_parameters()]
    buffers = [m._buffers[name] for placement in runtime[Models].placements for m, name in placement.owned_buffers()]
    decision = runtime[Scheduling].decision
    return {
        "steps": runtime.step.number,
        "rank": runtime.place.rank,
        "pipeline_parallel_degree": runtime.place.pp_size,
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in buffers if b is not None),
        "gradient_bytes": sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None),
        "live_frames": len(runtime[FrameTable]),
        "unclosed_frames": runtime[FrameTable].unclosed,
        "schedule": runtime[Scheduling].text,
        "schedule_decision": None if decision is None else decision.to_dict(),
        "departures": runtime[StateOrder].departures,
        "server": runtime.server.stats(),
        "efficiency": {"total": total.figures(), "step": newest.figures()},
        "communication": runtime.node.stats(),
    }


def report() -> dict[str, Any]:
    """The job in a few numbers, the same on every rank; called by all ranks, between steps.

    Returns:
        The number of ranks, the pipeline degree, the bytes of parameters that each rank holds, the forward and
        backward requests that crossed ranks since ``smp.init``, each rank's share of busy time, and the bubble over all
        ranks beside the schedule's ideal, and the schedules of the pipelines, each once; see :func:`stats`.
    """
    runtime = current_runtime()
    own = stats()
    sent = own["server"]["total"]["sent"]
    efficiency = own["efficiency"]["total"]
    ranks = gathered(
        "smp.report",
        (
            own["parameter_bytes"],
            sent["forward"] + sent["backward"],
            efficiency["busy"],
            efficiency["bubble"],
            own["schedule"],
        ),
        WORLD,
    )
    return {
        "ranks": len(ranks),
        "pipeline_parallel_degree": runtime.place.pp_size,
        "parameter_bytes_per_rank": [parameter_bytes for parameter_bytes, _, _, _, _ in ranks],
        "remote_requests": sum(requests for _, requests, _, _, _ in ranks),
        "busy_per_rank": [round(busy, 4) for _, _, busy, _, _ in ranks],
        "bubble": round(sum(bubble for _, _, _, bubble, _ in ranks) / len(ranks), 4),
        "ideal_bubble": None if efficiency["ideal_bubble"] is None else round(efficiency["ideal_bubble"], 4),
        "schedules": sorted({schedule for _, _, _, _, schedule in ranks}),
    }


def comm_stats() -> dict[str, Any]:
    """How this rank's tensors have travelled since ``smp.init``; sizes are in bytes.

    Returns:
        ``transport``: what the configuration asked for. ``messages_sent``, ``messages_received``, ``bytes_sent``,
        ``bytes_received``: all that went over the network, heartbeats included (in the bytes). ``strangers_dropped``:
        connections that did not prove the job's secret. ``routes``: for each route ``tensors_sent``,
        ``tensors_received``, ``bytes_sent`` and ``bytes_received``. ``fallbacks``: for each reason for which tensors
        took a worse route than the best, how many ``tensors`` did, and ``because``, the reason in words. ``peers``: for
        each other rank its ``host``, what it is ``reached_by``, and how its ``devices`` stand to this rank's.
    """
    stats: dict[str, Any] = current_runtime().node.comm_stats()
    return stats
