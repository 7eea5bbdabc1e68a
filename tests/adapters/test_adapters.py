"""Adapters of peft in a pipeline: switched in steps, of every kind, added, deleted and merged, beside one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.cases import CASES, REFUSED
from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("program.py")
#: How many jobs run the cases, one after another in each.
JOBS = 3


def said_of(names: list[str], degree: int = 2) -> dict[str, str]:
    output = outputs_of_ranks(PROGRAM, "|".join(names), str(degree), ranks=degree)[0]
    lines = [line.partition(": ") for line in output.splitlines()]
    return {name: said for name, _, said in lines if name in names}


@pytest.mark.parametrize("part", range(JOBS))
def test_adapters_compute_and_train_as_in_one_process(part: int) -> None:
    names = list(CASES)[part::JOBS]
    assert said_of(names) == dict.fromkeys(names, "exact")


def test_adapters_are_switched_alike_on_one_rank() -> None:
    names = [name for name in CASES if "set" in name or "nested" in name or "disabled" in name]
    assert said_of(names, 1) == dict.fromkeys(names, "exact")


def test_what_would_be_of_one_rank_is_refused_in_words() -> None:
    names = list(REFUSED)
    assert said_of(names) == dict.fromkeys(names, "refused")
