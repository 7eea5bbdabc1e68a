"""All cases, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.ray import cases, pages
from tests.ray.cases import DP2, PP2, PP2_DP2

CASES: dict[str, Callable[[Path], str]] = {
    "exact-pp2": cases.exact(PP2, 2),
    "exact-dp2": cases.exact(DP2, 2),
    "exact-pp2xdp2": cases.exact(PP2_DP2, 4),
    "data-pp2": cases.of_data({**PP2, "microbatches": 1}, 2, count=43),
    "data-pp2-first-rank-only": cases.of_data(PP2, 2, hands_on=False),
    "data-dp2": cases.of_data(DP2, 2),
    "data-pp2xdp2": cases.of_data(PP2_DP2, 4),
    "data-by-processes": cases.plain_shard,
    "data-of-another-division": cases.other_division,
    "data-fails": cases.data_fails,
    "resumed": cases.resumed(2, 2),
    "resumed-with-fewer": cases.resumed(2, 1),
    "killed": cases.ended(fate={"what": "killed", "rank": 1, "step": 5}),
    "killed-in-save": cases.ended(in_save={"what": "killed", "rank": 1, "step": 4}),
    "killed-then-fewer": cases.fewer,
    "full-disk": cases.full_disk,
    "error-in-step": cases.error_in_step,
    "error-between-steps": cases.error_between,
    "two-in-turn": cases.in_turn,
    "two-trials": cases.tuned,
    "transformers-trainer": pages.transformers_trainer,
    "example": pages.example,
    "guide": pages.guide,
}
