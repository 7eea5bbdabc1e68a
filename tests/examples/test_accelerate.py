"""The examples of accelerate, before and after the library came in: few lines differ, and no loss."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, run_script


def test_few_lines_change() -> None:
    before, after = (
        (EXAMPLES / name).read_text().splitlines() for name in ("accelerate_plain.py", "accelerate_ranks.py")
    )
    assert len([line for line in difflib.ndiff(before, after) if line.startswith("+ ")]) == 6  # one: the description


@pytest.mark.parametrize(("ranks", "degree"), [(2, 2), (4, 2), (3, 1)])
def test_the_losses_are_those_of_one_process_and_loading_is_exact(ranks: int, degree: int, tmp_path: Path) -> None:
    replicas = ranks // degree
    plain = run_script(EXAMPLES / "accelerate_plain.py", "--batch-size", "12", folder=tmp_path)
    ours = run_script(
        EXAMPLES / "accelerate_ranks.py",
        "--batch-size",
        str(12 // replicas),
        ranks=ranks,
        folder=tmp_path,
        SM_HP_MP_PARAMETERS=json.dumps({"pipeline_parallel_degree": degree}),
    )
    assert len(plain["first"]) == 24
    for part in ("first", "second"):
        assert ours[part] == pytest.approx(plain[part], rel=1e-4)
    assert ours["first"][:2] == pytest.approx(plain["first"][:2], rel=1e-6)
    assert ours["again"] == ours["second"]
