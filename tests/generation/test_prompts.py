"""Prefix tuning over a pipeline."""

from __future__ import annotations

import pytest

from tests.jobs.listed import run_in_job

_RANK = "tests.generation.rank"


@pytest.mark.parametrize("model", ["gpt2", "llama", "t5"])
def test_gradients_of_prompts_are_those_of_one_process(model: str) -> None:
    cases = [
        {"name": "prompts_train", "model": model, "microbatches": number, "trains_all": trains_all}
        for number in (1, 4)
        for trains_all in (False, True)
    ]
    run_in_job(_RANK, 2, cases)


@pytest.mark.parametrize("own_step", [False, True])
def test_a_model_with_prompts_generates_what_it_does_in_one_process(own_step: bool) -> None:
    cases = [
        {"name": "prompts_generate", "model": "gpt2", "microbatches": number, "own_step": own_step} for number in (1, 2)
    ]
    run_in_job(_RANK, 2, cases)
