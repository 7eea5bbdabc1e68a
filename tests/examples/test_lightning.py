"""The examples of Lightning, before and after the library came in: few lines differ, and no loss."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, run_script


def test_few_lines_change() -> None:
    before, after = (
        (EXAMPLES / name).read_text().splitlines() for name in ("lightning_plain.py", "lightning_ranks.py")
    )
    assert len([line for line in difflib.ndiff(before, after) if line.startswith("+ ")]) == 5  # one: the description


@pytest.mark.parametrize(("ranks", "degree"), [(2, 2), (4, 2), (3, 1)])
def test_the_losses_are_those_of_one_process_and_resuming_is_exact(ranks: int, degree: int, tmp_path: Path) -> None:
    for name in ("plain", "ranks"):
        (tmp_path / name).mkdir()
    plain = run_script(EXAMPLES / "lightning_plain.py", folder=tmp_path / "plain")
    ours = run_script(
        EXAMPLES / "lightning_ranks.py",
        "--batch-size",
        str(12 // (ranks // degree)),
        ranks=ranks,
        folder=tmp_path / "ranks",
        SM_HP_MP_PARAMETERS=json.dumps({"pipeline_parallel_degree": degree}),
    )
    assert len(plain["losses"]) == 24
    assert len(plain["evaluations"]) == 3
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours["losses"][:2] == pytest.approx(plain["losses"][:2], rel=1e-6)
    for one, other in zip(ours["evaluations"], plain["evaluations"], strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert ours["again"] == ours["losses"][8:]
