"""``generate`` of divided models."""

from __future__ import annotations

import pytest

from tests.jobs.listed import run_in_job

from .generates import WAYS

_RANK = "tests.generation.rank"
_MODELS = ("gpt2", "llama", "mistral", "gemma", "t5")
_MICROBATCHES = (1, 2, 4)


def _run(ways: list[str], model: str, ranks: int = 2, **others: object) -> None:
    cases = [
        {"name": "generates", "model": model, "way": way, "microbatches": number, **others}
        for way in ways
        for number in _MICROBATCHES
    ]
    run_in_job(_RANK, ranks, cases)


@pytest.mark.parametrize("model", _MODELS)
def test_the_likeliest_tokens_are_those_of_one_process(model: str) -> None:
    _run(["greedy"], model)


@pytest.mark.parametrize("model", _MODELS)
def test_sampled_tokens_are_those_of_one_process(model: str) -> None:
    _run(["sampled"], model)


@pytest.mark.parametrize("model", _MODELS)
def test_beams_are_those_of_one_process(model: str) -> None:
    _run(["beams"], model)


def test_other_ways_are_those_of_one_process() -> None:
    _run(sorted(WAYS.keys() - {"greedy", "sampled", "beams"}), "llama")


@pytest.mark.parametrize("model", ["llama", "gemma", "t5"])
def test_static_caches_give_the_tokens_of_one_process(model: str) -> None:
    _run(["greedy", "beams"], model, static=True)


def test_replicas_generate_for_their_own_sequences() -> None:
    cases = [
        {"name": "generates", "model": "llama", "way": way, "microbatches": 2, "replicas": 2} for way in sorted(WAYS)
    ]
    run_in_job(_RANK, 4, cases)


@pytest.mark.parametrize("way", ["assisted", "looked up"])
def test_candidates_are_confirmed_or_taken_back_on_all_ranks(way: str) -> None:
    run_in_job(_RANK, 2, [{"name": "with_candidates", "way": way}])


@pytest.mark.parametrize(("model", "way"), [("llama", "greedy"), ("t5", "beams"), ("gpt2", "beams")])
def test_scores_are_those_of_one_process(model: str, way: str) -> None:
    run_in_job(_RANK, 2, [{"name": "outputs", "model": model, "way": way}])
