"""A timeline as one self-contained page: a row per rank, as in the paper's figure 5."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from shardwright.timeline.records import Record, activity, label, step_intervals, summarise

_MARK = "{{timeline}}"


def write_html(records: Sequence[Record], path: str | Path) -> None:
    """Write records as a page that needs nothing but a browser; zoom with the wheel, drag to move.

    Args:
        records: Records of any number of ranks, on one clock.
        path: The file to write, commonly `timeline.html`.
    """
    template = resources.files("shardwright.timeline").joinpath("page.html").read_text()
    # A module's name must not be able to close the script element.
    data = json.dumps(_page_data(records), separators=(",", ":")).replace("</", "<\\/")
    Path(path).write_text(template.replace(_MARK, data))


def _page_data(records: Sequence[Record]) -> dict[str, object]:
    origin = min((record["start_ns"] for record in records), default=0)
    ordered = sorted(records, key=lambda record: (record["rank"], record["start_ns"]))
    names: dict[str, int] = {}
    spans = [
        [
            record["rank"],
            activity(record),
            record["start_ns"] - origin,
            record["end_ns"] - record["start_ns"],
            names.setdefault(label(record), len(names)),
            record["step"],
            record.get("microbatch"),
            record.get("worker"),
            record.get("bytes") or None,
        ]
        for record in ordered
    ]
    return {
        "names": list(names),
        "spans": spans,
        "steps": [[step, start - origin, end - origin] for step, (start, end) in step_intervals(records).items()],
        "ranks": [asdict(summary) for summary in summarise(records)],
    }
