"""Microbatches count by their weights: ``model.backward(loss, weight=...)`` and what follows from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.jobs.ranks import run_ranks

PROGRAM = Path(__file__).with_name("weighted_ranks.py")
LABELS = torch.tensor([[1, 2, 3], [1, -100, -100], [2, 2, -100], [-100, -100, 1]])
FIRST = "in microbatch 0 on rank 0"
ALLOWED = r"it has to be 0 or a number from 1e-30 to 1e\+30"
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
        assert len(found["unsummed"]) == (2 if passes == 1 else 0)
        for refused in found["unsummed"]:
            assert re.search(rf"model\.backward: weight is 1e\+308 in microbatch \d on rank \d; {ALLOWED}", refused)
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
        ([[float("nan")], [1.0]], f"weight is nan {FIRST}; {ALLOWED}"),
        ([[-1], [1.0]], f"weight is -1 {FIRST}; {ALLOWED}"),
        ([[1e308], [1e308]], rf"weight is 1e\+308 {FIRST}; {ALLOWED}"),
        ([[1.0], [1e308]], rf"weight is 1e\+308 in microbatch 1 on rank 0; {ALLOWED}"),
        ([[10**400], [1.0]], f"weight is larger than any float {FIRST}; {ALLOWED}"),
        ([[1e-310], [1.0]], f"weight is 1e-310 {FIRST}; {ALLOWED}"),
        ([[torch.ones(2)], [1.0]], rf"weight has shape \(2,\) and dtype torch.float32 {FIRST}; it has to be one real"),
        (
            [[torch.tensor(1j)], [1.0]],
            rf"weight has shape \(\) and dtype torch.complex64 {FIRST}; it has to be one real",
        ),
        ([["two"], [1.0]], f"weight is a str {FIRST}; it has to be a number"),
        ([[[3]], [1.0]], f"weight is a list {FIRST}; it has to be a number"),
    ],
)
def test_what_is_no_weight_is_refused_on_all_ranks(job: Job, weights: list[Any], said: str) -> None:
    def main(runtime: Runtime) -> None:
        model = model_of(2)
        with pytest.raises((ValueError, smp.ShardwrightError), match=said):
            step_with(weights)(model, LABELS)

    succeed(job, main, {"microbatches": 2})


def test_a_weight_that_the_dtype_of_a_loss_does_not_have_is_refused_on_all_ranks(job: Job) -> None:
    def main(runtime: Runtime) -> None:
        model = model_of(2)

        @smp.step
        def train(labels: torch.Tensor) -> None:
            loss = nn.functional.cross_entropy(model(labels).flatten(0, 1), labels.flatten())
            model.backward(loss.half(), weight=70_000)

        with pytest.raises(
            (ValueError, smp.RemoteError),
            match=rf"weight is 70000 {FIRST}, and its tensor of dtype torch\.float16, which has .* to 65504",
        ):
            train(LABELS.clamp(min=0))

    succeed(job, main, {"microbatches": 2})


def test_the_largest_and_the_least_weights_make_a_mean_in_float32(job: Job) -> None:
    def main(runtime: Runtime) -> None:
        torch.manual_seed(0)
        module = nn.Linear(3, 1)
        smp.set_partition(module, 0)
        model = smp.DistributedModel(module)
        found: dict[float, torch.Tensor] = {}

        @smp.step
        def train(inputs: torch.Tensor, weight: float) -> torch.Tensor:
            loss = model(inputs).square().mean()
            model.backward(loss, weight=weight)
            return loss

        for weight in (1.0, 1e30, 1e-30):
            assert train(torch.arange(12.0).reshape(4, 3) / 12, weight).reduce_mean().isfinite()
            for name, parameter in model.local_named_parameters():
                if name.endswith("weight"):
                    assert parameter.grad is not None
                    torch.testing.assert_close(parameter.grad, found.setdefault(1.0, parameter.grad))
                parameter.grad = None

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


@pytest.mark.parametrize("average", [True, False])
def test_sums_over_microbatches_are_not_divided_by_weights_and_the_mean_of_losses_is(job: Job, average: bool) -> None:
    inputs, weights = torch.arange(12.0).reshape(4, 3) / 12, [3.0, 5.0]

    def made() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(3, 1)

    plain = made()
    losses = [plain(part).square().mean() for part in inputs.chunk(2)]
    total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
    (gradient, _) = torch.autograd.grad(total, list(plain.parameters()))

    def main(runtime: Runtime) -> None:
        module = made()
        smp.set_partition(module, 0)
        model = smp.DistributedModel(module, average_grads_across_microbatches=average)
        given = iter(weights)

        @smp.step
        def train(inputs: torch.Tensor) -> torch.Tensor:
            loss = model(inputs).square().mean()
            model.backward(loss, weight=next(given))
            return loss

        torch.testing.assert_close(train(inputs).reduce_mean(), (total / 8).detach())
        if runtime.place.rank == 0:
            torch.testing.assert_close(module.weight.grad, gradient / 8 if average else gradient)

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
                logits, loss = evaluate(model, labels if runtime.place.rank == 0 else None)
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
