"""Trainer over ranks is Trainer in one process; ``make trainers`` runs all kinds and layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks
from tests.trainers.runs import BAR, ROOT, compare, run

CHECKS = "tests.trainers.checks"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "layout"), [("t5", "pp2"), pytest.param("gpt2", "pp2xdp2", marks=pytest.mark.slow)])
def test_losses_metrics_and_resumed_trainings_are_exact(kind: str, layout: str) -> None:
    (plain,) = run(kind, "plain", "float64")
    outcome = compare(layout, plain, run(kind, layout, "float64"))
    assert not outcome.problems
    assert outcome.difference <= BAR, outcome.of


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_rest_of_the_interface(ranks: int, tmp_path: Path) -> None:
    """What `checks.py` lists, in one process and over ranks, an odd number of them too."""
    first, *_ = outputs_of_ranks("-m", CHECKS, str(ranks), str(tmp_path), ranks=ranks, folder=ROOT)
    assert json.loads(first.splitlines()[-1])["checks"] >= 10
