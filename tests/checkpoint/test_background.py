"""Saves in the background: whatever becomes of a rank, the others end, are told, and give the directory back."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shardwright._core import newest_checkpoint

from tests.checkpoint.running import SHARDED, case, run
from tests.jobs.ranks import Ended, run_ranks, told

#: The moment at which a rank is lost: which of how many, and which checkpoint is then the newest.
MOMENTS = {
    "before": (1, 2, ["a"]),
    "between": (2, 3, ["a"]),
    "after": (1, 2, ["b"]),
    "first": (0, 2, ["a"]),
    "last": (0, 2, ["a"]),
}


def said(rank: Ended, what: str) -> Any:
    """What a rank has written of this."""
    found = [json.loads(line) for line in rank.out.splitlines() if line.startswith("{")]
    return next((one[what] for one in found if what in one), None)


def test_a_rank_lost_during_a_save_ends_it_at_once(tmp_path: Path) -> None:
    """Before it tells, between two that tell, after it, and rank 0: named, the lock given back, nothing half."""

    def lose(moment: str) -> list[Ended]:
        folder = tmp_path / moment
        folder.mkdir()
        command = ("-m", "tests.checkpoint.lost_in_background", folder, moment)
        return run_ranks(*command, ranks=MOMENTS[moment][1])

    with ThreadPoolExecutor(len(MOMENTS)) as pool:
        jobs = dict(zip(MOMENTS, pool.map(lose, MOMENTS), strict=True))
    for moment, ranks in jobs.items():
        lost, _, newest = MOMENTS[moment]
        path = tmp_path / moment / "checkpoints"
        assert [newest_checkpoint(path)] == newest, (moment, told(ranks))
        assert ranks[lost].code == -9
        for number, rank in enumerate(ranks):
            if number == lost:
                continue
            assert rank.code == 0, (moment, rank)
            if lost != 0 and number == 0:
                assert said(rank, "locked") < 20, (moment, rank)
                assert said(rank, "at_once") or not list(path.glob(".*writing")), moment
                assert said(rank, "ended") < 20, (moment, rank)
            if moment != "after" and number == 0 and not said(rank, "at_once"):
                assert f"rank {lost}" in rank.err, (moment, rank)
                assert "was not saved" in rank.err, (moment, rank)


def test_what_ranks_do_not_share_is_named_and_the_lock_ends_with_the_save(tmp_path: Path) -> None:
    cases = [
        case(name, SHARDED, folder=str(tmp_path / name))
        for name in ("unshared_in_background", "locked_as_long_as_it_saves", "uncopied_in_background")
    ]
    run(2, *cases)
