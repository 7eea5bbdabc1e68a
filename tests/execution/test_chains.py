"""Parts of an ``nn.Sequential`` on several ranks that send their results straight to one another."""

import collections
import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.execution import serve
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn

from tests.frames.job import Job, in_process_ranks

WIDTH = 4


class Layer(nn.Module):
    """A layer with a weight, so that it can be placed, and one of several ways with its argument."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH) + 0.1)

    def forward(self, given: Any) -> Any:
        first, *others = given if isinstance(given, tuple) else (given,)
        match self.way:
            case "linear":
                return first @ self.weight
            case "pair":
                return first @ self.weight, first.sum() * self.weight
            case "number":
                return first @ self.weight, 3
            case "same":
                return given
            case "view":
                return first.t().t()
            case "writes":
                first.mul_(1.5)
                return first @ self.weight
            case "writes and returns":
                return first.mul_(1.5)
            case "keeps":
                self.kept = (first @ self.weight).sigmoid()
                return self.kept
            case "saves its result":
                return (first @ self.weight).sigmoid()
            case "hooks":
                result = first @ self.weight
                if result.requires_grad:
                    result.register_hook(lambda gradient: 2 * gradient)
                return result
            case "detaches":
                return (first @ self.weight).detach()
            case "without gradients":
                with torch.no_grad():
                    return first @ self.weight
            case "expanded":
                return (first @ self.weight).sum(1, keepdim=True).expand(-1, WIDTH)
            case "uses all":
                return first @ self.weight + sum(value.sum() if torch.is_tensor(value) else value for value in others)
        raise AssertionError(self.way)


WAYS = (
    *("linear",) * 4,
    *("pair", "number", "same", "view", "writes", "writes and returns", "keeps", "saves its result", "hooks"),
    *("detaches", "without gradients", "expanded", "uses all", "uses all"),
)


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[int, Job]]:
    with in_process_ranks():
        made = {ranks: Job(ranks) for ranks in (2, 3, 4)}
        yield made
        for job in made.values():
            job.close()


@pytest.fixture
def sent_on(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often a result went to the next rank, and how often that was given up."""
    counts: collections.Counter[str] = collections.Counter()
    pass_on = serve._pass_on

    def counting(runtime: Any, request: Any, task: Any, following: Any, spec: Any, parts: Any) -> None:
        counts["given up" if following[1].is_stopped else "passed"] += 1
        pass_on(runtime, request, task, following, spec, parts)

    monkeypatch.setattr(serve, "_pass_on", counting)
    return counts


def gradients_alone(model: nn.Module, batch: torch.Tensor, microbatches: int) -> dict[str, torch.Tensor | None]:
    """Gradients of plain torch; raises what plain torch refuses."""
    for part in batch.chunk(microbatches):
        result = model(part * 1)
        loss = result[0].square().sum() if isinstance(result, tuple) else result.square().sum()
        if loss.requires_grad:
            loss.backward()
    return {
        name: None if parameter.grad is None else parameter.grad / microbatches
        for name, parameter in model.named_parameters()
    }


def gradients_divided(
    job: Job, original: nn.Module, batch: torch.Tensor, places: list[int], settings: dict[str, Any]
) -> dict[str, torch.Tensor | None]:
    def main(runtime: Runtime) -> dict[str, torch.Tensor | None]:
        module = copy.deepcopy(original)
        for child, rank in zip(module.children(), places, strict=True):
            smp.set_partition(child, rank)
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> torch.Tensor:
            result = model(part * 1)
            loss = result[0].square().sum() if isinstance(result, tuple) else result.square().sum()
            if loss.requires_grad:
                model.backward(loss)
            return loss.detach()

        train(batch)
        return {name: p.grad for name, p in module.named_parameters() if not is_sentinel(p)}

    found: dict[str, torch.Tensor | None] = {}
    for result in job.run(main, {"auto_partition": False, "default_partition": 0, **settings}):
        if isinstance(result, BaseException):
            raise result
        found |= result
    assert job.rests
    return found


def layers(*ways: str) -> nn.Module:
    torch.manual_seed(len(ways))
    return nn.Sequential(*map(Layer, ways)).double()


def compare(job: Job, ways: list[str], places: list[int], settings: dict[str, Any]) -> bool:
    """Whether plain torch can run it; asserts that the divided model then gives the same."""
    model = layers(*ways)
    batch = torch.rand(2 * settings["microbatches"], WIDTH, dtype=torch.float64)
    try:
        expected = gradients_alone(copy.deepcopy(model), batch, settings["microbatches"])
    except (RuntimeError, TypeError):
        return False
    found = gradients_divided(job, model, batch, places, settings)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        other = found[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            torch.testing.assert_close(other, gradient, rtol=1e-10, atol=1e-12, msg=name)
    return True


@pytest.mark.parametrize("pipeline", ["simple", "interleaved", "zero_bubble"])
def test_random_chains_are_exact(jobs: dict[int, Job], sent_on: collections.Counter[str], pipeline: str) -> None:
    ran = refused = 0
    for seed in range(60):
        draw = random.Random(f"{pipeline} {seed}")
        ranks = draw.choice((2, 3, 4))
        ways = [draw.choice(WAYS) for _ in range(draw.randint(3, 7))]
        places = [draw.randrange(ranks) for _ in ways]
        try:
            ran += compare(jobs[ranks], ways, places, {"microbatches": draw.randint(1, 3), "pipeline": pipeline})
        except (FrameError, RemoteError) as error:
            if isinstance(error, RemoteError) and error.kind != "FrameError":
                raise
            refused += 1
        except AssertionError as error:
            raise AssertionError(f"{ways} on {places}: {error}") from error
    assert ran > 30
    assert refused < 10
    assert sent_on["passed"] > 20
    assert sent_on["given up"] > 5


def test_results_go_from_rank_to_rank_and_gradients_come_back_the_same_way(
    jobs: dict[int, Job], sent_on: collections.Counter[str]
) -> None:
    settings = {"microbatches": 2, "pipeline": "interleaved"}
    assert compare(jobs[4], ["linear"] * 6, [0, 1, 2, 2, 3, 0], settings)
    assert sent_on == {"passed": 2 * 2}
    for runtime in jobs[4].runtimes[1:]:
        stats = runtime.server.stats()["step"]
        assert stats["served"]["forward"] == stats["served"]["backward"] == 2


def test_a_result_that_a_rank_keeps_may_not_be_written_to_on_the_next(jobs: dict[int, Job]) -> None:
    model, batch = layers("linear", "keeps", "writes and returns"), torch.rand(4, WIDTH, dtype=torch.float64)
    with pytest.raises((FrameError, RemoteError), match="kept"):
        gradients_divided(jobs[3], model, batch, [0, 1, 2], {"microbatches": 2})


def test_calls_that_no_gradient_reaches_are_closed(jobs: dict[int, Job], sent_on: collections.Counter[str]) -> None:
    settings = {"microbatches": 2, "pipeline": "interleaved"}
    assert compare(jobs[4], ["linear", "linear", "detaches", "linear"], [0, 1, 2, 3], settings)
    assert compare(jobs[4], ["linear", "linear", "linear", "detaches"], [0, 1, 2, 3], settings)
    assert sent_on["passed"] == 8
