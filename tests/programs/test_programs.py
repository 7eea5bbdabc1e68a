"""Random programs: exact or refused, never silently wrong; ``make programs`` tries many more."""

from __future__ import annotations

import pytest
import torch

from tests.programs.conftest import SUMMARY
from tests.programs.log import AROUND_STEPS, NEEDED
from tests.programs.outcome import Outcome, difference
from tests.programs.running import run_plain
from tests.programs.summary import Summary
from tests.programs.trials import FOUND, jobs, stored, try_program, try_seeds

#: These are tried with every change, the others with all tests.
SEEDS = range(200)
MORE_SEEDS = range(200, 2000)
#: Of those that make use of more.
WIDE_SEEDS = range(80)
MORE_WIDE_SEEDS = range(80, 120)
#: The smallest share of programs in which each needed feature must occur.
MIN_SHARE = 0.15


def try_programs(seeds: range, config: pytest.Config, wide: bool = False) -> Summary:
    with jobs() as on:
        summary = Summary(list(try_seeds(seeds, on, wide)))
    table = f"{summary.table()}\n{summary.as_json()}"
    config.stash[SUMMARY] = config.stash.get(SUMMARY, "") + f"\n{table}"
    assert summary.passes, table
    for feature in NEEDED:
        assert wide or summary.share(feature) >= MIN_SHARE, f"{feature}\n{table}"
    assert min(summary.crossed) >= 0.7, table
    return summary


def test_random_programs_are_exact_or_refused(request: pytest.FixtureRequest) -> None:
    try_programs(SEEDS, request.config)


def test_random_programs_that_make_use_of_more_are_exact_or_refused(request: pytest.FixtureRequest) -> None:
    summary = try_programs(WIDE_SEEDS, request.config, wide=True)
    assert not [feature for feature in AROUND_STEPS if not summary.share(feature)], summary.table()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_more_random_programs_are_exact_or_refused(request: pytest.FixtureRequest) -> None:
    try_programs(MORE_SEEDS, request.config)
    try_programs(MORE_WIDE_SEEDS, request.config, wide=True)


def test_programs_that_once_went_wrong_are_exact_or_refused() -> None:
    trials = []
    with jobs() as on:
        for line in FOUND.read_text().splitlines():
            program = stored(line)
            plain, log = run_plain(program)
            trials.append(try_program(program, plain, frozenset(log.features), on))
    assert not Summary(trials).failures, Summary(trials).table()


@pytest.mark.parametrize(("seed", "sharded"), [(5, False), (7, True)])
def test_a_program_runs_in_real_processes_with_replicas(seed: int, sharded: bool) -> None:
    with jobs() as on:
        (trial,) = try_seeds([seed], on, wide=True, processes=1.0)
    assert trial.verdict == "exact", trial.why
    assert all(trial.crossed)
    assert "replicas" in trial.features
    assert ("sharded optimizer state" in trial.features) == sharded


def test_noise_of_plain_torch_excuses_no_more_than_a_hundred_times_itself() -> None:
    def outcome(value: float) -> Outcome:
        return Outcome({"loss": torch.tensor([1.0, value], dtype=torch.float64)})

    plain, rounded = outcome(1.0), [outcome(1.0), outcome(1.0 + 1e-9)]
    assert difference(plain, outcome(1.0 + 5e-11)) is None
    assert difference(plain, outcome(1.0 + 5e-8)) is not None
    assert difference(plain, outcome(1.0 + 5e-8), rounded) is None
    assert difference(plain, outcome(1.0 + 2e-7), rounded) is not None
    assert difference(plain, outcome(1.0 + 5e-8), [plain]) is not None, "plain torch is sure of it"
    for other in (3.0, float("inf"), float("nan")):  # it went another way
        assert difference(plain, outcome(1.0 + 2e-6), [outcome(other)]) is not None


def test_what_subtraction_leaves_of_equal_numbers_has_no_scale_of_its_own() -> None:
    def returned(left: float, beside: float = 1.0) -> Outcome:
        tensors = {"a, tensor 0": torch.tensor([beside]).double(), "a, tensor 1": torch.tensor([left]).double()}
        return Outcome(tensors)

    plain, rounded = returned(3e-15), [returned(1e-15)]
    assert difference(plain, returned(-3e-15), rounded) is None
    assert difference(plain, returned(-3e-15)) is not None, "unless plain torch says so itself"
    assert difference(plain, returned(-3e-15), [plain]) is not None
    assert difference(plain, returned(3e-14), rounded) is not None, "it is more than is left over"
    assert difference(returned(3e-15, 1e-3), returned(-3e-15, 1e-3), [returned(1e-15, 1e-3)]) is not None
    assert difference(returned(3e-9), returned(-3e-9), [returned(1e-9)]) is not None

    def lost(left: float) -> Outcome:
        return Outcome({"a, tensor 0": torch.ones(1).double(), "loss 3": torch.tensor(left).double()})

    assert difference(lost(3e-17), lost(1e-17), [lost(2e-17)]) is None
    assert difference(lost(3e-17), lost(1e-17), [lost(3e-17)]) is not None, "unless plain torch says so itself"
    assert difference(lost(3e-9), lost(1e-9), [lost(2e-9)]) is not None


def test_what_hooks_see_of_cancelled_gradients_is_measured_by_the_others() -> None:
    def fired(value: float) -> Outcome:
        return Outcome(
            {f"parameter {name}, firing 0": torch.tensor([one]).double() for name, one in (("a", 1.0), ("b", value))}
        )

    assert difference(fired(1e-14), fired(2e-14)) is None
    assert difference(fired(1e-2), fired(2e-2)) is not None
