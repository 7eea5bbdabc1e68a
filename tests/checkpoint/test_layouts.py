"""A few pairs of layouts; ``make test-checkpoint`` runs all."""

from __future__ import annotations

from tests.checkpoint.layouts.__main__ import run
from tests.checkpoint.layouts.cases import load_cases

PAIRS = {
    "GPT-2-2x1x1-to-1x2x1-optimizer",
    "GPT-2-1x2x1-optimizer-to-1x1x2-parameters",
    "T5-1x1x2-parameters-to-1x2x1",
    "T5-1x2x1-to-2x1x1",
}


def test_what_one_layout_saves_another_loads() -> None:
    cases = [case for case in load_cases() if case.name in PAIRS]
    assert len(cases) == len(PAIRS)
    saved, loaded = run(cases, show_logs=False)
    assert len(loaded) == len(PAIRS)
    assert [outcome.failures for outcome in (*saved, *loaded) if outcome.failures] == []
