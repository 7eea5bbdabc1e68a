"""All cases, by name: the function of `cases` or `pages`, and what it is given besides its folder."""

from __future__ import annotations

from typing import Any

from tests.ray.layouts import DP2, PP2, PP2_DP2

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "exact-pp2": ("cases.exact", {"config": PP2, "workers": 2}),
    "exact-dp2": ("cases.exact", {"config": DP2, "workers": 2}),
    "exact-pp2xdp2": ("cases.exact", {"config": PP2_DP2, "workers": 4}),
    "data-pp2": ("cases.of_data", {"config": {**PP2, "microbatches": 1}, "workers": 2, "count": 43}),
    "data-pp2-first-rank-only": ("cases.of_data", {"config": PP2, "workers": 2, "hands_on": False}),
    "data-dp2": ("cases.of_data", {"config": DP2, "workers": 2}),
    "data-pp2xdp2": ("cases.of_data", {"config": PP2_DP2, "workers": 4}),
    "data-by-processes": ("cases.plain_shard", {}),
    "data-of-another-division": ("cases.other_division", {}),
    "data-fails": ("cases.data_fails", {}),
    "resumed": ("cases.resumed", {"before": 2, "after": 2}),
    "resumed-with-fewer": ("cases.resumed", {"before": 2, "after": 1}),
    "killed": ("cases.ended", {"fate": {"what": "killed", "rank": 1, "step": 5}}),
    "killed-in-save": ("cases.ended", {"in_save": {"what": "killed", "rank": 1, "step": 4}}),
    "killed-then-fewer": ("cases.fewer", {}),
    "full-disk": ("cases.full_disk", {}),
    "error-in-step": ("cases.error_in_step", {}),
    "error-between-steps": ("cases.error_between", {}),
    "two-in-turn": ("cases.in_turn", {}),
    "two-trials": ("cases.tuned", {}),
    "transformers-trainer": ("pages.transformers_trainer", {}),
    "example": ("pages.example", {}),
    "guide": ("pages.guide", {}),
}
