"""What the benchmark of memory takes for a missed bar."""

from __future__ import annotations

from typing import Any

import pytest

from benches.memory.rows import ROWS, missed_bars

#: Bytes a second that a disk takes and gives.
QUICK, SLOW = (1e12, 1e12), (1.0, 1.0)


def measured(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that meet all bars, with changes to those whose names are given."""
    base = {"peak_bytes": 100, "step_seconds": 1.0, "optimizer_bytes": 80, "peaks": [100, 100], "moved": [10, 10]}
    rows = [{"name": row.name, "offloaded": [0, 0], **base} for row in ROWS]
    for row in rows:
        if row["name"].endswith("disk offload"):
            row |= {"peaks": [60, 60], "offloaded": [45, 45], "step_seconds": 1.07}
        if row["name"].endswith("optimizer sharding"):
            row["optimizer_bytes"] = 41
        row |= changes.get(row["name"], {})
    return rows


def test_rows_that_meet_all_bars() -> None:
    assert missed_bars(measured(), QUICK) == []
    assert missed_bars(measured()[:1], QUICK) == []


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("pipeline 2, checkpointing, disk offload", {"peaks": [60, 70]}, "peaks fall by 0.778"),
        ("pipeline 2, checkpointing, disk offload", {"step_seconds": 1.1}, "offloading takes 1.100"),
        ("data parallel 2, optimizer sharding", {"optimizer_bytes": 43}, "has 0.537 of the optimizer's state"),
        ("data parallel 2, sharded, stage 2", {"peak_bytes": 101}, "stage 2 has 1.010 of FSDP2's peak"),
        ("data parallel 2, sharded, stage 3", {"step_seconds": 1.06}, "stage 3 takes 1.060 of FSDP2's time"),
    ],
)
def test_each_bar_can_be_missed(name: str, change: dict[str, Any], said: str) -> None:
    (line,) = missed_bars(measured(**{name: change}), QUICK)
    assert said in line


def test_offloading_may_take_longer_where_the_disk_does() -> None:
    rows = measured(**{"pipeline 2, checkpointing, disk offload": {"step_seconds": 5.0}})
    assert missed_bars(rows, SLOW) == []
    assert len(missed_bars(rows, QUICK)) == 1
