"""Timelines written from records: what they add up to, and that both forms hold every record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from shardwright.timeline import Record, summarise, write_chrome_trace, write_html

MS = 1_000_000


def record(rank: int, kind: Any, start: int, end: int, **more: Any) -> Record:
    made: dict[str, Any] = {"rank": rank, "step": 0, "kind": kind, "start_ns": start * MS, "end_ns": end * MS, **more}
    return made  # type: ignore[return-value]


@pytest.fixture
def records() -> list[Record]:
    """A step over two ranks, offset on the clock as real ones are."""
    return [
        record(0, "root", 1000, 1010, phase="forward", worker=0, microbatch=0),
        record(0, "send", 1010, 1012, peer=1, bytes=4096, microbatch=0),
        record(0, "wait", 1010, 1030, worker=0, microbatch=0),
        record(0, "send", 1011, 1013, peer=1, bytes=1024, microbatch=1),
        record(1, "forward", 1012, 1022, worker=0, module="transformer.h.2", microbatch=0),
        record(1, "backward", 1022, 1028, worker=0, module="transformer.h.2", microbatch=0),
        record(0, "root", 1030, 1040, phase="backward", worker=0, microbatch=0),
    ]


def test_time_without_a_task_is_idle_within_the_step(records: list[Record]) -> None:
    first, second = summarise(records)
    assert (first.forward_ns, first.backward_ns, first.idle_ns) == (10 * MS, 10 * MS, 20 * MS)
    assert (second.forward_ns, second.backward_ns, second.idle_ns) == (10 * MS, 6 * MS, 24 * MS)
    assert first.step_ns == second.step_ns == 40 * MS
    assert (first.sent_bytes, second.sent_bytes) == (5120, 0)


def test_the_pause_between_steps_is_not_idle(records: list[Record]) -> None:
    later: list[Record] = [
        {**r, "step": 1, "start_ns": r["start_ns"] + 1000 * MS, "end_ns": r["end_ns"] + 1000 * MS} for r in records
    ]
    first = summarise(records + later)[0]
    assert (first.step_ns, first.idle_ns) == (80 * MS, 40 * MS)


def test_the_trace_holds_every_record_with_its_place(records: list[Record], tmp_path: Path) -> None:
    write_chrome_trace(records, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(records)
    forward = next(event for event in slices if event["name"] == "transformer.h.2 [0]" and event["cat"] == "forward")
    assert (forward["pid"], forward["ts"], forward["dur"]) == (1, 12_000.0, 10_000.0)
    assert forward["args"] == {"step": 0, "microbatch": 0, "module": "transformer.h.2"}
    names = {(event["pid"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert {(0, "rank 0"), (1, "rank 1"), (0, "worker 0"), (0, "send"), (0, "send 2")} <= names


def test_slices_of_one_thread_never_overlap(records: list[Record], tmp_path: Path) -> None:
    write_chrome_trace(records, tmp_path / "trace.json")
    ends: dict[tuple[int, int], float] = {}
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            thread = (event["pid"], event["tid"])
            assert event["ts"] >= ends.get(thread, 0.0)
            ends[thread] = event["ts"] + event["dur"]


def test_the_page_is_self_contained_and_holds_every_record(records: list[Record], tmp_path: Path) -> None:
    records[4]["module"] = "</script><b>odd"
    write_html(records, tmp_path / "timeline.html")
    page = (tmp_path / "timeline.html").read_text()
    assert not re.search(r"(src|href)=|https?://|@import", page)
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert embedded
    data = json.loads(embedded.group(1))
    assert len(data["spans"]) == len(records)
    assert data["steps"] == [[0, 0, 40 * MS]]
    assert [summary["idle_ns"] for summary in data["ranks"]] == [20 * MS, 24 * MS]
    assert "</script><b>odd" in data["names"]


def test_nothing_recorded_gives_empty_pictures(tmp_path: Path) -> None:
    write_chrome_trace([], tmp_path / "trace.json")
    write_html([], tmp_path / "timeline.html")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
    assert '"spans":[]' in (tmp_path / "timeline.html").read_text()
