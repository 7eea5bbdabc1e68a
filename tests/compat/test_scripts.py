"""Scripts for the original library compute what plain PyTorch does; ``make compat`` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.plain import PLAIN, SCRIPTS
from tests.compat.runs import RUNS, Run, compare


@pytest.mark.parametrize("run", [run for run in RUNS if run.quick], ids=lambda run: run.name)
def test_a_script_computes_what_plain_pytorch_does(run: Run, tmp_path: Path) -> None:
    outcome = compare(run, tmp_path)
    assert not outcome.why
    assert outcome.losses >= 6


def test_every_script_has_a_plain_form_and_runs() -> None:
    scripts = {path.stem for path in SCRIPTS.glob("*.py")}
    assert scripts == PLAIN.keys() == {run.script for run in RUNS} == {run.script for run in RUNS if run.quick}


def test_scripts_know_the_library_by_its_old_name_only() -> None:
    for path in SCRIPTS.glob("*.py"):
        text = path.read_text()
        assert "import smdistributed.modelparallel.torch as smp" in text
        assert "shardwright" not in text
