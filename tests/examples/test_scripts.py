"""The example before and after the library came in: how far apart the two scripts are, and that each trains."""

from __future__ import annotations

import ast
import difflib
import json
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, run_script

PLAIN = EXAMPLES / "train_gpt_plain.py"
SPLIT = EXAMPLES / "train_gpt.py"
SMALL = ("--steps", "30", "--batch-size", "8", "--sequence-length", "32", "--layers", "4", "--width", "32")


def changed_lines(before: list[str], after: list[str]) -> int:
    """Lines to touch to get from one text to the other; a changed line counts once."""
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in blocks if kind != "equal")


def imported_modules(script: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def test_the_library_came_in_with_at_most_twelve_changed_lines() -> None:
    before, after = PLAIN.read_text().splitlines(), SPLIT.read_text().splitlines()
    assert 0 < changed_lines(before, after) <= 12


def test_the_plain_script_knows_nothing_of_the_library() -> None:
    assert "shardwright" not in PLAIN.read_text()


def test_the_scripts_share_no_helper_module() -> None:
    siblings = {path.stem for path in EXAMPLES.glob("*.py")}
    for script in (PLAIN, SPLIT):
        assert not imported_modules(script) & siblings
    assert imported_modules(SPLIT) - imported_modules(PLAIN) == {"shardwright"}


def test_the_plain_script_learns(tmp_path: Path) -> None:
    report = run_script(PLAIN, *SMALL, folder=tmp_path)
    assert report["loss_last"] < report["loss_first"] - 0.5


@pytest.mark.parametrize(("ranks", "degree"), [(1, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_the_split_script_learns_on_any_number_of_ranks(ranks: int, degree: int, tmp_path: Path) -> None:
    parameters = json.dumps({"pipeline_parallel_degree": degree})
    report = run_script(SPLIT, *SMALL, ranks=ranks, folder=tmp_path, SM_HP_MP_PARAMETERS=parameters)
    assert report["loss_last"] < report["loss_first"] - 0.5
    assert (report["ranks"], report["pipeline_parallel_degree"]) == (ranks, degree)
    assert len(report["parameter_bytes_per_rank"]) == ranks
    assert (report["remote_requests"] > 0) == (degree > 1)
    assert {"tokens_per_s", "seconds"} <= report.keys()
    pictures = {path.name for path in (tmp_path / "out" / "timeline").iterdir()}
    assert pictures == {"trace.json", "timeline.html"}


def test_both_scripts_start_at_the_same_loss(tmp_path: Path) -> None:
    assert run_script(SPLIT, *SMALL, folder=tmp_path)["loss_first"] == pytest.approx(
        run_script(PLAIN, *SMALL, folder=tmp_path)["loss_first"], rel=1e-5
    )
