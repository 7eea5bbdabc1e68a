"""Step functions with a number of microbatches of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import shardwright as smp
import torch
import transformers
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture

MODES: list[dict[str, Any]] = [
    {},
    {"static_mode": True, "fast_mode": True, "static_steps": 1},
    {"pipeline": "auto"},
    {"pipeline": "zero_bubble"},
]
LIST = [(number, phase) for phase in ("forward", "backward") for number in range(4)]


job = job_fixture(2)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def stepped(**options: Any) -> Any:
    @smp.step(**options)
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        model.backward(loss)
        return loss

    return train


@pytest.mark.parametrize("rows", [12, 120])
@pytest.mark.parametrize("settings", MODES)
def test_each_gives_the_gradients_of_the_batch_and_one_takes_any_number(
    job: Job, settings: dict[str, Any], rows: int
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 160), nn.Tanh(), nn.Linear(160, 4)).double()
    batches = [torch.randn(rows, 4, dtype=torch.float64) for _ in range(5)]

    def main(runtime: Runtime) -> int:
        own = copy.deepcopy(module)
        smp.set_partition(own, 0)
        smp.set_partition(own[0], 1)
        model = smp.DistributedModel(own)
        functions = [stepped(), stepped(microbatches=3), stepped(microbatches=1)]

        @smp.step(microbatches=1)
        def predict(model: Any, x: torch.Tensor) -> torch.Tensor:
            return model(x)

        compared = 0
        for x in batches:
            for function, number in zip(functions, (4, 3, 1), strict=True):
                alone = copy.deepcopy(module)
                expected = loss_of(alone, x)
                expected.backward()
                for parameter in model.local_parameters():
                    parameter.grad = None
                found = function(model, x)
                assert len(found.outputs) == number
                torch.testing.assert_close(found.reduce_mean(), expected.detach())
                gradients = dict(alone.named_parameters())
                for name, parameter in model.local_named_parameters():
                    torch.testing.assert_close(parameter.grad, gradients[name].grad)
                    compared += 1
            with torch.no_grad():
                torch.testing.assert_close(predict(model, x[:7]).concat(), module(x[:7]))
        return compared

    assert job.run(main, {"microbatches": 4, **settings}) == [30, 30]


class Counting(nn.Module):
    """A linear layer that knows how often it has run, and of how many rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.ran: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran.append(len(x))
        return self.linear(x)


@pytest.mark.parametrize("width", [4, 1200])
@pytest.mark.parametrize("settings", MODES)
def test_a_batch_of_one_sample_runs_once_where_the_configuration_has_more_microbatches(
    job: Job, settings: dict[str, Any], width: int
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Counting(width), Counting(width)).double()
    sample = torch.randn(1, width, dtype=torch.float64)

    def main(runtime: Runtime) -> list[int]:
        own = copy.deepcopy(module)
        smp.set_partition(own, 0)
        smp.set_partition(own[1], 1)
        model = smp.DistributedModel(own)

        @smp.step(microbatches=1)
        def predict(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        with torch.no_grad():
            predict(sample)  # the first step may trace
            own[runtime.place.rank].ran.clear()
            (found,) = predict(sample).outputs
        torch.testing.assert_close(found, module(sample).detach())
        return own[runtime.place.rank].ran

    assert job.run(main, {"microbatches": 4, **settings}) == [[1], [1]]


def test_a_language_model_generates_from_one_prompt_where_the_configuration_has_more_microbatches(job: Job) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).eval()
    prompt = torch.tensor([[5, 7, 11]])
    asked = {"max_new_tokens": 4, "do_sample": False}

    def main(runtime: Runtime) -> torch.Tensor:
        own = copy.deepcopy(plain)
        smp.set_partition(own, 0)
        smp.set_partition(own.transformer.h[1], 1)
        model = smp.DistributedModel(own)
        model.eval()

        @smp.step(microbatches=1)
        def generate(ids: torch.Tensor) -> torch.Tensor:
            return model.module.generate(ids, **asked)

        with torch.no_grad():
            return generate(prompt).concat()

    for found in job.run(main, {"microbatches": 4}):
        assert torch.equal(found, plain.generate(prompt, **asked)), found


def test_a_list_is_for_steps_of_one_number(job: Job) -> None:
    def main(runtime: Runtime) -> None:
        model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        stepped(microbatches=4)(model, torch.ones(4, 4))
        stepped(microbatches=2)(model, torch.ones(4, 4))

    errors = job.run(main, {"microbatches": 4, "pipeline": LIST, "active_microbatches": 4})
    for error in errors:
        assert isinstance(error, smp.ConfigError)
        assert "microbatches=2" in str(error)
        assert "a list for steps of 4" in str(error)


@pytest.mark.parametrize("number", [0, -1, 1.0, True, "2"])
def test_what_is_no_number_is_refused(number: Any) -> None:
    with pytest.raises(smp.ConfigError, match="microbatches of"):
        stepped(microbatches=number)
