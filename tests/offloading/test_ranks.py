"""Offloading over real ranks: when tensors come back, memory that falls, a disk that is full, timelines, accounts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ranks import outputs_of_ranks

HERE = Path(__file__).parent


def found_by(program: str, *arguments: str, ranks: int = 2) -> list[dict[str, Any]]:
    outputs = outputs_of_ranks(HERE / program, *arguments, ranks=ranks)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("found: ")]
    return [json.loads(line.removeprefix("found: ")) for line in lines]


@pytest.mark.parametrize("horizon", [1, 3])
def test_tensors_come_back_while_the_call_before_is_computed_again(horizon: int) -> None:
    """Each second computation waits until those within the horizon are back, which only the plan has asked for."""
    for rank in found_by("ahead.py", str(horizon)):
        counts = rank["counts"]
        assert counts["computed_again"] == 3 * 4 * 4
        assert counts["loaded"] >= counts["computed_again"] // 2
        # Of a microbatch's calls only the first may be needed before anything has shown that its backward is near.
        assert counts["waited"] <= 3 * 4
        assert rank["in_time"] == counts["computed_again"]


def test_the_peak_of_memory_falls_by_most_of_what_is_checkpointed() -> None:
    alone, offloaded = found_by("peak.py", "false"), found_by("peak.py", "disk")
    assert [rank["loss"] for rank in alone] == [rank["loss"] for rank in offloaded]
    for before, after in zip(alone, offloaded, strict=True):
        checkpointed = before["checkpointed_bytes"]
        assert after["counts"]["most_bytes"] >= 0.8 * checkpointed
        assert before["peak"] - after["peak"] >= 0.8 * checkpointed, (before, after)


def test_a_full_disk_fails_the_step_on_every_rank_and_the_next_step_is_exact() -> None:
    own, other = found_by("full.py")
    assert own["kind"] == "OffloadError"
    for part in ("rank 0 could not write the activations of module 'blocks.", "in microbatch ", " bytes at offset "):
        assert part in own["text"]
        assert part in other["text"]
    assert "its file in " in own["text"]
    assert other["kind"] == "RemoteError"
    for rank in (own, other):
        assert rank["again"] == rank["expected"]
        assert rank["left"] == 0


def test_timelines_show_transfers_and_second_computations() -> None:
    (found, *_) = found_by("traced.py")
    spans = found["spans"]
    for rank in ("0", "1"):
        kinds = spans[rank]
        # Three blocks on each rank, two microbatches, one step.
        assert kinds["recompute"]["number"] == 3 * 2
        assert kinds["recompute"]["inside"] == kinds["recompute"]["number"]
        assert kinds["offload"]["number"] > 0
        assert kinds["load"]["number"] > 0
        assert all(name.startswith("module 'blocks.") for name in kinds["load"]["modules"])
        summary = found["summary"][rank]
        assert summary["recompute_ns"] > 0
        assert summary["offloaded_bytes"] == kinds["offload"]["bytes"]
        assert summary["loaded_bytes"] == kinds["load"]["bytes"]
    assert found["report"][0]["offloaded"] > 0
