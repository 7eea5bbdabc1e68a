"""``smp.stats``, ``smp.report`` and ``smp.comm_stats``: statistics of a rank and of the job.

Before ``smp.init``, all functions raise :class:`ShardwrightError`.
"""

from __future__ import annotations

from typing import Any

from shardwright.execution.frame_table import FrameTable
from shardwright.execution.state_order import StateOrder
from shardwright.job.objects import gathered
from shardwright.job.ranks import WORLD
from shardwright.job.runtime import current_runtime
from shardwright.model.models import Models
from shardwright.quantized import num_bytes
from shardwright.scheduling import Scheduling


def stats() -> dict[str, Any]:
    """Return statistics of this rank since ``smp.init``.

    Returns:
        A dict with the number of steps; requests sent and served, by direction (``server``); live frames, and frames
        that no request closed; bytes of the parameters, buffers and gradients of this rank; and messages and bytes sent
        and received (``communication``). ``efficiency`` is the time spent in steps: ``total`` for all steps except
        those that partitioned a model, and ``step`` for the last one. ``busy`` and ``waiting`` are shares of this time;
        ``waiting_seconds`` is keyed by the global rank whose message ended the wait; ``bubble`` is the share of the
        tasks' time in which no task ran; ``ideal_bubble`` is the bubble of the schedule if all ranks have equal costs
        and no other overhead, or None if unknown. ``schedule`` is the schedule of the pipeline. ``schedule_decision``
        explains the choice of ``"pipeline": "auto"``: the first step with the schedule, the measured steps, their mean
        seconds, and the simulated seconds of each candidate; None without a choice. ``departures`` is the number of
        steps that static mode ran again.

    Raises:
        ShardwrightError: In a forked process, such as a worker of a DataLoader; or ``smp.init`` has not been called.
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
        "parameter_bytes": sum(map(num_bytes, parameters)),
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
    """Return a summary of the job. All ranks must call this, between steps.

    Returns:
        A dict, the same on every rank, with the number of ranks, the pipeline degree, the bytes of parameters of each
        rank, the number of forward and backward requests between ranks since ``smp.init``, each rank's share of busy
        time, the mean bubble and the ideal bubble, and the schedules in use; see :func:`stats`.

    Raises:
        PeerLostError: A rank is gone.
        ShardwrightError: Another rank calls a different function, or ``smp.init`` has not been called.
    """
    runtime = current_runtime()
    own = stats()
    sent = own["server"]["total"]["sent"]
    efficiency = own["efficiency"]["total"]
    requests = sent["forward"] + sent["backward"]
    said = (own["parameter_bytes"], requests, efficiency["busy"], efficiency["bubble"], own["schedule"])
    parameter_bytes, requests, busy, bubbles, schedules = zip(*gathered("smp.report", said, WORLD), strict=True)
    return {
        "ranks": len(busy),
        "pipeline_parallel_degree": runtime.place.pp_size,
        "parameter_bytes_per_rank": list(parameter_bytes),
        "remote_requests": sum(requests),
        "busy_per_rank": [round(share, 4) for share in busy],
        "bubble": round(sum(bubbles) / len(bubbles), 4),
        "ideal_bubble": None if efficiency["ideal_bubble"] is None else round(efficiency["ideal_bubble"], 4),
        "schedules": sorted(set(schedules)),
    }


def comm_stats() -> dict[str, Any]:
    """Return statistics of this rank's communication since ``smp.init``.

    Returns:
        A dict with these keys. ``transport``: the configured transport. ``messages_sent``, ``messages_received``,
        ``bytes_sent``, ``bytes_received``: all network traffic; bytes include heartbeats. ``unknown_peers_dropped``:
        the number of connections that failed to authenticate. ``buffer_used_bytes``: how much of the persistent buffer
        (``comm_buffer_bytes``) is in use, tensors that other ranks of the host still hold included. ``routes``:
        ``tensors_sent``, ``tensors_received``, ``bytes_sent`` and ``bytes_received`` of each route. ``fallbacks``: for
        each reason why tensors did not take the best route, the number of ``tensors`` and an explanation
        (``because``). ``peers``: for each other rank its ``host``, the transport it is ``reached_by``, and the relation
        of its ``devices`` to this rank's.

    Raises:
        ShardwrightError: In a forked process, such as a worker of a DataLoader; or ``smp.init`` has not been called.
    """
    stats: dict[str, Any] = current_runtime().node.comm_stats()
    return stats
