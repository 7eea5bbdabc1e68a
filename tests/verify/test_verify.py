"""``smp.verify`` on two ranks: clean models are exact, planted faults are named, and nothing is left of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ranks import outputs_of_ranks

JOB = Path(__file__).with_name("job.py")
SECONDS = HANG_SECONDS

CLEAN = ["GPT-2", "GPT-2 with dropout", "GPT-2 in float32", "T5", "CNN", "chain", "chain with dropout", "tied"]
#: By scenario: the module to be named, where, the rank that runs it, and a part of what is said.
FAULTS = {
    "scaled weight": ("branch", "backward", 1, "the gradient of its parameter 'branch.weight' departs"),
    "scaled input of third": ("third", "backward", 1, "the gradient departs on the way back through it"),
    "scaled input of second": ("second", "backward", 1, "the gradient departs on the way back through it"),
    "scaled output of a module without parameters": ("drop", "backward", 1, "on the way back through it"),
    "scaled output": ("second", "backward", 1, "the gradient of its parameter"),
    "scaled in GPT-2": ("transformer.h.2.mlp.c_fc", "backward", 1, "the gradient of its parameter"),
    "detached output": ("branch", "forward", 1, "its output is detached"),
    "detached input": ("third", "backward", 1, "no gradient comes on the way back through it"),
    "swapped microbatch": ("third", "forward", 1, "equals that of microbatch 0: microbatches are swapped"),
    "untied": ("words.head", "backward", 1, "tied to 'words.embedding.weight'"),
}
OTHERS = [
    "clean unequal labels",
    "fault_on_rank_0",
    "random_numbers_of_python",
    "left alone chain with dropout",
    "left alone CNN",
    "left alone counting",
    "evaluation",
    "refusals",
]


def outcomes(pp: int, dp: int, names: list[str], random_numbers: str = "usual") -> dict[str, list[Any]]:
    """By scenario, what each rank printed."""
    found: dict[str, list[Any]] = {}
    for output in outputs_of_ranks(JOB, str(pp), str(dp), random_numbers, *names, ranks=pp * dp, seconds=SECONDS):
        for line in output.splitlines():
            row = json.loads(line)
            found.setdefault(row["scenario"], []).append(row["outcome"])
    return found


@pytest.fixture(scope="module")
def pipeline() -> dict[str, list[Any]]:
    """Every scenario, in one job of two pipeline ranks."""
    return outcomes(2, 1, [*(f"clean {name}" for name in CLEAN), *FAULTS, *OTHERS])


pytestmark = pytest.mark.timeout(SECONDS + 20)


def check_exact(report: dict[str, Any], ranks: int) -> None:
    assert report["exact"], report["text"]
    assert report["first_departure"] is None
    assert report["worst"] <= report["tolerance"]
    assert report["requests"][0] > 0
    assert report["ranks_with_parameters"] == list(range(ranks))
    assert report["module_calls"] >= 24


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_is_exact_before_and_after_it_is_divided(pipeline: dict[str, list[Any]], name: str) -> None:
    first, second = pipeline[f"clean {name}"]
    assert first == second, "every rank has the same report"
    for report in first:
        check_exact(report, 2)
        assert report["requests"][1] > 0
        assert {"loss", "output", "gradient"} <= set(report["kinds"])
        assert "exact: the distributed step equals one process" in report["text"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_its_module_named(pipeline: dict[str, list[Any]], name: str) -> None:
    module, phase, rank, what = FAULTS[name]
    first, second = pipeline[name]
    assert first == second
    assert not first["exact"]
    assert first["first_departure"] == module, first["text"]
    assert (first["phase"], first["rank"]) == (phase, rank)
    assert what in first["what"]
    assert repr(module) in first["text"]
    if name.startswith("scaled"):
        assert 5e-4 < first["departure_error"] < 2e-3
    assert first["requests"][0] > 0


def test_a_gradient_hook_that_one_process_does_not_run_is_named_as_a_reason(pipeline: dict[str, list[Any]]) -> None:
    [note] = pipeline["scaled weight"][0]["notes"]
    assert "gradient hooks on 'branch.weight' ran on the ranks" in note


def test_a_swapped_microbatch_is_told_by_its_number(pipeline: dict[str, list[Any]]) -> None:
    assert pipeline["swapped microbatch"][0]["microbatch"] == 1


def test_a_tie_that_is_lost_has_a_row_of_its_own(pipeline: dict[str, list[Any]]) -> None:
    assert "tie words.head.weight" in pipeline["untied"][0]["failed_names"]
    assert "tie" in pipeline["clean tied"][0][0]["kinds"]


def test_unequal_label_counts_are_a_note_with_the_fix_and_no_failure(pipeline: dict[str, list[Any]]) -> None:
    for report in pipeline["clean unequal labels"][0]:
        check_exact(report, 2)
        [note] = report["notes"]
        assert "the numbers of labels differ (1, 1, 2, 2)" in note
        assert "model.backward(loss, weight=(labels != -100).sum())" in note


def test_batch_normalisation_is_a_note_with_the_fix_and_no_failure(pipeline: dict[str, list[Any]]) -> None:
    for report in pipeline["clean CNN"][0]:
        [note] = report["notes"]
        assert "batch normalisation ('first.1', 'second.1')" in note
        assert "GroupNorm" in note
        assert "buffer" in report["kinds"]


@pytest.mark.parametrize("name", ["GPT-2", "T5", "chain", "chain with dropout", "tied"])
def test_there_is_no_note_where_microbatches_change_nothing(pipeline: dict[str, list[Any]], name: str) -> None:
    assert [report["notes"] for report in pipeline[f"clean {name}"][0]] == [[], []]


def test_a_fault_in_the_first_ranks_own_module_is_seen_against_a_model_built_anew(
    pipeline: dict[str, list[Any]],
) -> None:
    outcome = pipeline["fault_on_rank_0"][0]
    assert outcome["copied"]["exact"]
    assert (outcome["rebuilt"]["first_departure"], outcome["rebuilt"]["rank"]) == ("act", 0)


def test_a_difference_due_to_random_numbers_is_said_to_be(pipeline: dict[str, list[Any]]) -> None:
    outcome = pipeline["random_numbers_of_python"][0]
    assert outcome["first_departure"] == "third"
    assert "draws random numbers from Python's random" in outcome["notes"][0]


@pytest.mark.parametrize("name", ["chain with dropout", "CNN", "counting"])
def test_training_goes_on_as_if_nothing_had_been_verified(pipeline: dict[str, list[Any]], name: str) -> None:
    for outcome in pipeline[f"left alone {name}"]:
        assert outcome["different"] == []
        assert outcome["keys"]
        assert outcome["compared"] >= 12
        assert outcome["reports"] == [True] * 6


def test_an_evaluation_is_verified_without_gradients(pipeline: dict[str, list[Any]]) -> None:
    report = pipeline["evaluation"][0]
    check_exact(report, 2)
    assert report["requests"][1] == 0
    assert report["kinds"] == ["buffer", "output"]


def test_bad_input_is_refused_and_a_difference_raises_when_asked(pipeline: dict[str, list[Any]]) -> None:
    first, second = pipeline["refusals"]
    assert first["plain function"].startswith("ConfigError: smp.verify was given function 'labelled' first; allowed")
    assert first["tolerance"] == "ConfigError: tolerance is -1.0; allowed: a positive number"
    assert first["other model"].startswith("ConfigError: reference() built a different model: ")
    assert first["no module"].startswith("ConfigError: reference() returned 0 objects for 1 models")
    assert second["other model"].startswith("ShardwrightError: smp.verify failed on rank 0: ConfigError: reference()")
    for outcome in (first, second):
        assert outcome["difference"].startswith("VerificationError: ")
        assert "'third'" in outcome["difference"]
        assert outcome["lenient"] == "True"


@pytest.mark.parametrize(("pp", "dp", "random_numbers"), [(1, 2, "usual"), (2, 2, "usual"), (2, 2, "reproducible")])
def test_replicas_are_run_one_after_another_in_one_process(pp: int, dp: int, random_numbers: str) -> None:
    found = outcomes(pp, dp, ["clean chain with dropout", "clean CNN"], random_numbers)
    for reports in found.values():
        assert len(reports) == pp * dp
        for report in reports[0]:
            assert report["exact"], report["text"]
            assert report["ranks_with_parameters"] == list(range(pp * dp))
            assert (report["requests"][1] > 0) == (pp > 1)
