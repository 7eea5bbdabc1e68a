"""Microbatches count by their weights: ``model.backward(loss, weight=...)`` and what follows from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.jobs.ranks import run_ranks

PROGRAM = Path(__file__).with_name("weighted_ranks.py")
LABELS = torch.tensor([[1, 2, 3], [1, -100, -100], [2, 2, -100], [-100, -100, 1]])
job = job_fixture(2)


@pytest.mark.parametrize(
    ("ranks", "degree", "passes"), [(1, 1, 1), (2, 2, 1), (2, 1, 1), (2, 1, 2), (4, 2, 1), (4, 2, 2)]
)
def test_gradients_and_losses_are_those_of_the_whole_batch(ranks: int, degree: int, passes: int) -> None:
    ended = run_ranks(PROGRAM, str(degree), str(passes), ranks=ranks)
    assert [rank.code for rank in ended] == [0] * ranks, ended
    for rank in ended:
        found = json.loads(rank.out.splitlines()[-1])
        assert len(found["errors"]) == (4 if passes == 1 else 2)
        assert max(found["errors"]) < 1e-13, found
        assert max(found["losses"]) < 1e-13
        assert found["unweighted"] > 1e-3
        for refused in found["refused"]:
            assert "without a weight and the others with one" in refused
        assert len(found["refused"]) == (passes == 1 and ranks > degree)
    told = [line for rank in ended for line in rank.err.splitlines() if "different numbers of labels" in line]
    # Rank 0 of each pipeline, once, and only in steps without weights.
    assert len(told) == (ranks // degree if passes == 1 else 0)
    assert all("weight=(labels != -100).sum()" in line for line in told)


def succeed(job: Job, main: Callable[[Runtime], None], settings: dict[str, Any]) -> None:
    assert job.run(main, settings) == [None, None]


def model_of(degree: int) -> smp.DistributedModel:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5)).double()
    smp.set_partition(module, 0)
    smp.set_partition(module[1], degree - 1)
    return smp.DistributedModel(module)


def step_with(weights: list[Any], **options: Any) -> Any:
    given = iter(weights)

    @smp.step(**options)
    def train(model: Any, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(labels.clamp(min=0)).flatten(0, 1), labels.flatten())
        for weight in next(given):
            model.backward(loss * 1.0 if weight is None else loss * 2.0, weight=weight)
        return loss

    return train


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([[1.0], [None]], "give a weight in every microbatch of a step or in none"),
        ([[None], [2.0]], "give a weight in every microbatch of a step or in none"),
        ([[float("nan")], [1.0]], "weight is nan; it has to be a finite number from 0"),
        ([[-1], [1.0]], "weight is -1.0; it has to be a finite number from 0"),
        ([[torch.ones(2)], [1.0]], r"weight has shape \(2,\); it has to be one number"),
        ([["two"], [1.0]], "weight is a str; it has to be a number"),
        ([[[3]], [1.0]], "weight is a list; it has to be a number"),
    ],
)
def test_what_is_no_weight_is_refused_on_all_ranks(job: Job, weights: list[Any], said: str) -> None:
    def main(runtime: Runtime) -> None:
        model = model_of(2)
        with pytest.raises((ValueError, smp.ShardwrightError), match=said):
            step_with(weights)(model, LABELS)

    succeed(job, main, {"microbatches": 2})


def test_a_microbatch_has_one_weight_for_all_its_losses(job: Job) -> None:
    def main(runtime: Runtime) -> None:
        model = model_of(2)
        with pytest.raises(smp.ShardwrightError, match=r"weight=3\.0 before and weight=4\.0 now"):
            step_with([[3, 4], [1, 1]])(model, LABELS)

    succeed(job, main, {"microbatches": 2})


def test_where_nothing_counts_gradients_are_zero_and_the_mean_is_no_number(job: Job) -> None:
    def main(runtime: Runtime) -> None:
        model = model_of(2)
        loss = step_with([[0], [0]])(model, LABELS)
        assert loss.reduce_mean().isnan()
        for _, parameter in model.local_named_parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()

    succeed(job, main, {"microbatches": 2})


@pytest.mark.parametrize("settings", [{}, {"static_mode": True, "fast_mode": True, "static_steps": 1}])
@pytest.mark.parametrize("rows", [7, 9, 10, 4])
def test_an_evaluation_takes_a_batch_that_does_not_divide_evenly(job: Job, rows: int, settings: dict[str, Any]) -> None:
    labels = torch.randint(0, 5, (rows, 300))

    def main(runtime: Runtime) -> None:
        model = model_of(2)

        @smp.step
        def evaluate(model: Any, labels: torch.Tensor) -> Any:
            logits = model(labels)
            return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

        plain = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5)).double()
        plain.load_state_dict(model.state_dict())
        for _ in range(4):
            with torch.no_grad():
                logits, loss = evaluate(model, labels if runtime.rank == 0 else None)
                expected = plain(labels)
            assert torch.equal(logits.concat(), expected)
            wanted = nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
            torch.testing.assert_close(loss.reduce_mean(), wanted, rtol=1e-14, atol=0)
            train = step_with([[None]] * 4)
            train(model, labels[:4])
        with pytest.raises(smp.ShardwrightError, match=r"evaluate under torch\.no_grad"):
            evaluate(model, torch.zeros(rows + (rows % 4 == 0), 2, dtype=torch.long))

    succeed(job, main, {"microbatches": 4, **settings})


def test_a_batch_smaller_than_the_number_of_microbatches_says_what_to_write(job: Job) -> None:
    def main(runtime: Runtime) -> None:
        model = model_of(2)
        with torch.no_grad(), pytest.raises(smp.ShardwrightError, match=r"@smp.step\(microbatches=1\)"):
            step_with([[]] * 4)(model, LABELS[:3])

    succeed(job, main, {"microbatches": 4})
