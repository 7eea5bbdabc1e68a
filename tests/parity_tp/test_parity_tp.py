"""The parity command of tensor parallelism covers what it must, finds what is wrong, and holds in some of its cases."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.jobs.patience import HANG_SECONDS
from tests.parity.job import ROOT

from .cases import BATCHES, MODELS, MODULES, OPTIMIZE, PLACES, TensorCase, cases
from .table import judge, render

CASE = TensorCase("GPT-2", 2, 2, "interleaved", 2)


def row(stage: int, **changes: Any) -> dict[str, Any]:
    usual = {
        "worst": 1e-15,
        "where": "there",
        "failures": [],
        "stage": stage,
        "parameters": 3,
        "collectives": 5,
        "forward": 4,
        "backward": 4,
    }
    return usual | changes


def test_the_whole_product_is_there_and_the_usual_choice_covers_every_pair() -> None:
    assert len({case.name for case in cases(True)}) == len(cases(True))
    places = {(c.pp, c.tp, c.rdp, c.optimize, c.batches) for c in cases(True) if c.problem == "T5"}
    assert places >= {(*place, *mode) for place in PLACES for mode in itertools.product(OPTIMIZE, BATCHES)}
    some = cases()
    assert [case.problem for case in some if case.delayed] == list(MODELS)
    assert {case.name for case in some} <= {case.name for case in cases(True)}
    for problem in (*MODULES, *MODELS):
        found = [case for case in some if case.problem == problem]
        assert {(case.pp, case.tp, case.optimize) for case in found} >= {
            (*place[:2], optimize) for place in PLACES[1:-1] for optimize in OPTIMIZE
        }
        assert PLACES[-1] in {(case.pp, case.tp, case.rdp) for case in found}
        assert {case.batches for case in found} == {case.batches for case in cases(True) if case.problem == problem}


@pytest.mark.parametrize(
    "changed",
    [
        {"worst": 1e-9},
        {"forward": 0},
        {"backward": 0},
        {"parameters": 0},
        {"collectives": 0},
        {"failures": ["something"]},
        {"error": "ValueError: no"},
    ],
)
def test_a_case_fails_for_each_thing_that_can_be_wrong(changed: dict[str, Any]) -> None:
    assert not judge(CASE, [row(0), row(0), row(1), row(1)]).failures
    outcome = judge(CASE, [row(rank // 2, **changed) for rank in range(4)])
    assert outcome.failures
    assert "FAILED" in render([outcome])
    assert judge(CASE, [row(0), None]).failures


@pytest.mark.slow  # `make test` runs a choice of cases by itself
def test_some_cases_hold() -> None:
    pytest.importorskip("transformers")
    chosen = [
        "GPT-2-pp2-tp2-memory-*",
        "Llama-pp2-tp2-speed-*",
        "DistributedLinear-pp2-tp2-*",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity_tp", "--only", *chosen],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'python'}"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    summary = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-4000:]
    assert summary["cases"] == 5
    assert summary["failed"] == 0
    assert summary["worst_rel_error"] < 1e-10
