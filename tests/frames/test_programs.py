"""Random programs: exact or refused, never silently wrong; ``python -m tests.frames.programs`` tries many more."""

from __future__ import annotations

import pytest

from tests.frames.conftest import SUMMARY
from tests.frames.log import NEEDED
from tests.frames.programs import FOUND, LEAST_SHARE, Summary, jobs, run_plain, stored, try_program, try_seeds

#: A few hundred are tried with every change, the others with all tests.
SEEDS = range(300)
MORE_SEEDS = range(300, 2000)


def try_programs(seeds: range, config: pytest.Config) -> None:
    with jobs() as on:
        summary = Summary(list(try_seeds(seeds, on)))
    table = f"{summary.table()}\n{summary.as_json()}"
    config.stash[SUMMARY] = table
    assert summary.passes, table
    for feature in NEEDED:
        assert summary.share(feature) >= LEAST_SHARE, f"{feature}\n{table}"
    assert min(summary.crossed) >= 0.7, table


@pytest.mark.timeout(600)
def test_random_programs_are_exact_or_refused(request: pytest.FixtureRequest) -> None:
    try_programs(SEEDS, request.config)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_more_random_programs_are_exact_or_refused(request: pytest.FixtureRequest) -> None:
    try_programs(MORE_SEEDS, request.config)


def test_programs_that_once_went_wrong_are_exact_or_refused() -> None:
    trials = []
    with jobs() as on:
        for line in FOUND.read_text().splitlines():
            program = stored(line)
            plain, log = run_plain(program)
            trials.append(try_program(program, plain, frozenset(log.features), on))
    assert not Summary(trials).of("wrong"), Summary(trials).table()
    assert len(Summary(trials).of("refused")) < len(trials) / 2
