"""``smp.write_timeline``: the newest steps of all ranks, as pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardwright.objects import receive_on, send_on
from shardwright.runtime import current_runtime
from shardwright.timeline.chrome import write_chrome_trace
from shardwright.timeline.page import write_html
from shardwright.timeline.records import Record

_CHANNEL = "timeline"


def write_timeline(folder: str | Path, *, num_steps: int = 20) -> Path | None:
    """Write `trace.json` (for Perfetto) and `timeline.html` of the newest steps; called by all ranks, between steps.

    Records are kept in a ring of bounded size and handed out once: a second call writes what happened since the first.

    Args:
        folder: Where rank 0 writes; made if need be.
        num_steps: The number of newest steps to write.

    Returns:
        The path of the page on rank 0, None on the others.
    """
    runtime = current_runtime()
    records: list[Record] = runtime.server.take_trace() + runtime.recorder.take(runtime.rank)
    records = [record for record in records if record["step"] > runtime.step - num_steps]
    if runtime.rank > 0:
        send_on(runtime, 0, _CHANNEL, json.dumps(records).encode())
        return None
    for rank in range(1, runtime.launch.world_size):
        records += json.loads(receive_on(runtime, rank, _CHANNEL))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_chrome_trace(records, folder / "trace.json")
    write_html(records, folder / "timeline.html")
    print(f"timeline: {folder / 'timeline.html'} and {folder / 'trace.json'}", file=sys.stderr)
    return folder / "timeline.html"
