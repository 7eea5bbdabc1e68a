"""Calls of divided models with key/value caches."""

from __future__ import annotations

import pytest

from tests.jobs.listed import run_in_job

_RANK = "tests.generation.rank"


@pytest.mark.parametrize(
    ("model", "cache"),
    [
        ("gpt2", "dynamic"),
        ("gpt2", "lazy"),
        ("llama", "static"),
        ("llama", "own"),
        ("mistral", "dynamic"),
        ("gemma", "dynamic"),
        ("gemma", "static"),
        ("t5", "encoder-decoder"),
    ],
)
def test_a_loop_of_the_script_gives_the_tokens_and_scores_of_one_process(model: str, cache: str) -> None:
    cases = [{"name": "own_loop", "model": model, "cache": cache, "microbatches": number} for number in (1, 2, 4)]
    run_in_job(_RANK, 2, cases)


def test_each_rank_holds_the_layers_of_its_modules_which_never_cross() -> None:
    run_in_job(_RANK, 2, [{"name": "each_rank_holds_its_layers", "model": "llama"}])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_lives_as_long_as_the_script_has_it(kind: str) -> None:
    run_in_job(_RANK, 2, [{"name": "given_from_outside", "kind": kind}])


def test_what_cannot_be_exact_is_refused() -> None:
    run_in_job(_RANK, 2, [{"name": "refusals"}])
