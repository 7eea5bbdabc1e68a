"""A timeline in the Chrome trace format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.timeline.records import Record, activity, label

_TRANSFER_LANES = 1_000  # worker ids stay below; each rank's sends and receives take lanes from here on
_LANES_PER_DIRECTION = 1_000


def write_chrome_trace(records: Sequence[Record], path: str | Path) -> None:
    """Write records as a trace: a process per rank, a thread per worker, and lanes for messages under way.

    Args:
        records: Records of any number of ranks, on one clock.
        path: The file to write, commonly `trace.json`.
    """
    events: list[dict[str, Any]] = []
    origin = min((record["start_ns"] for record in records), default=0)
    lane_ends: dict[tuple[int, str], list[int]] = {}
    threads: dict[tuple[int, int], str] = {}
    for record in sorted(records, key=lambda record: (record["start_ns"], record["end_ns"])):
        rank, kind, worker = record["rank"], record["kind"], record.get("worker")
        if kind in ("send", "receive"):
            lane = _free_lane(lane_ends.setdefault((rank, kind), []), record)
            thread = _TRANSFER_LANES + lane + (_LANES_PER_DIRECTION if kind == "receive" else 0)
            threads[rank, thread] = kind if lane == 0 else f"{kind} {lane + 1}"
        else:
            thread = 0 if worker is None else worker + 1
            threads[rank, thread] = "main thread" if worker is None else f"worker {worker}"
        arguments = {
            name: record[name]
            for name in ("step", "microbatch", "module", "phase", "peer", "bytes")
            if record.get(name) is not None
        }
        microbatch = record.get("microbatch")
        events.append(
            {
                "name": label(record) if microbatch is None else f"{label(record)} [{microbatch}]",
                "cat": activity(record),
                "ph": "X",
                "pid": rank,
                "tid": thread,
                "ts": (record["start_ns"] - origin) / 1e3,
                "dur": (record["end_ns"] - record["start_ns"]) / 1e3,
                "args": arguments,
            }
        )
    metadata = [_named("process_name", rank, 0, f"rank {rank}") for rank in sorted({rank for rank, _ in threads})]
    metadata += [_named("thread_name", rank, thread, name) for (rank, thread), name in sorted(threads.items())]
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": metadata + events}))


def _free_lane(lane_ends: list[int], record: Record) -> int:
    """The first lane that is free when the record begins: slices of one thread must not overlap."""
    for lane, end in enumerate(lane_ends):
        if end <= record["start_ns"]:
            lane_ends[lane] = record["end_ns"]
            return lane
    lane_ends.append(record["end_ns"])
    return len(lane_ends) - 1


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
