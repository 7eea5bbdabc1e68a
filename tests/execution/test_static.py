"""Static mode: callers that go on before results are there, and modules that depart from what they did before."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import DepartureError
from shardwright.execution.state_order import StateOrder
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn

from tests.frames.job import Job, job_fixture

WIDTH = 4
MICROBATCHES = 3
STATIC = {"static_mode": True, "fast_mode": True, "static_steps": 2, "microbatches": MICROBATCHES}
#: Told to every module before each step; a global, because all ranks are in one process.
STEP = 0


class Layer(nn.Module):
    """A layer that behaves otherwise in one step."""

    def __init__(
        self, odd: Callable[[Any, torch.Tensor], Any] | None = None, at: int = 4, counting: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH) + 0.1)
        self.odd, self.at = odd, at
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64) if counting else None)

    def forward(self, given: torch.Tensor) -> Any:
        if self.calls is not None:
            self.calls += 1
        result = (given @ self.weight).sigmoid()
        return result if self.odd is None or self.at != STEP else self.odd(self, result)


class Loop(nn.Module):
    """Layers called one by one; what they return may be missing, or come with something else."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            result = layer(value)
            if isinstance(result, tuple):
                result = result[0] * result[1].mean()
            if result is not None:
                value = result
        return value.square().mean()


class Loss(nn.Module):
    """The end of a sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.square().mean() * self.scale


def sequential(layers: list[nn.Module]) -> nn.Module:
    return nn.Sequential(*layers, Loss())


job = job_fixture(3)


def alone(model: nn.Module, batch: torch.Tensor, steps: int) -> list[dict[str, torch.Tensor]]:
    """The gradients and buffers after each step of plain torch."""
    global STEP
    found = []
    for step in range(steps):
        STEP = step
        model.zero_grad()
        for part in batch.chunk(MICROBATCHES):
            model(part).backward()
        state = {name: p.grad / MICROBATCHES for name, p in model.named_parameters() if p.grad is not None}
        found.append(state | {name: buffer.clone() for name, buffer in model.named_buffers()})
    return found


def divided(
    job: Job,
    original: nn.Module,
    batch: torch.Tensor,
    place: Callable[[nn.Module], None],
    settings: dict[str, Any],
    steps: int,
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, int]]]:
    """The same of a divided model, and what rank 0 counts in each step."""

    def main(runtime: Runtime) -> list[tuple[dict[str, torch.Tensor], dict[str, int]]]:
        global STEP
        module = copy.deepcopy(original)
        place(module)
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> torch.Tensor:
            loss = model(part)
            model.backward(loss)
            return loss

        found, before = [], runtime[StateOrder].departures
        for step in range(steps):
            STEP = max(step, STEP) if step else 0
            model.zero_grad()
            train(batch)
            state = {
                name: p.grad.clone()
                for name, p in module.named_parameters()
                if not is_sentinel(p) and p.grad is not None
            }
            state |= {name: buffer.clone() for name, buffer in module.named_buffers() if not is_sentinel(buffer)}
            stats = runtime.server.stats()["step"]
            found.append(
                (state, {"suspensions": stats["suspensions"], "departures": smp.stats()["departures"] - before})
            )
        return found

    results = job.run(main, {"auto_partition": False, "default_partition": 0, **STATIC, **settings})
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert job.rests
    states: list[dict[str, torch.Tensor]] = [{} for _ in range(steps)]
    for result in results:
        for state, (found, _) in zip(states, result, strict=True):
            state |= found
    return states, [counted for _, counted in results[0]]


def compare(
    job: Job, model: nn.Module, places: list[int], settings: dict[str, Any], steps: int = 6
) -> list[dict[str, int]]:
    torch.manual_seed(7)
    model = model.double()
    batch = torch.rand(2 * MICROBATCHES, WIDTH, dtype=torch.float64)
    expected = alone(copy.deepcopy(model), batch, steps)

    def place(module: nn.Module) -> None:
        parts: list[nn.Module] = list(module.layers if isinstance(module, Loop) else module)  # type: ignore[arg-type]
        for part, rank in zip(parts, places, strict=True):
            smp.set_partition(part, rank)

    found, counted = divided(job, model, batch, place, settings, steps)
    for step, (state, other) in enumerate(zip(expected, found, strict=True)):
        assert state.keys() == other.keys(), step
        for name, value in state.items():
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-12, msg=f"{name} in step {step}")
    return counted


@pytest.mark.parametrize("pipeline", ["simple", "interleaved", "looped", "zero_bubble"])
@pytest.mark.parametrize(
    ("kind", "places"), [(Loop, [1, 2, 0, 1, 2]), (Loop, [1, 1, 2, 2, 1]), (sequential, [0, 1, 1, 2, 2])]
)
def test_steps_stay_exact_and_wait_less(
    job: Job, kind: Callable[[list[nn.Module]], nn.Module], places: list[int], pipeline: str
) -> None:
    layers: list[nn.Module] = [Layer() for _ in range(len(places) - (kind is sequential))]
    counted = compare(job, kind(layers), places, {"pipeline": pipeline})
    assert counted[-1]["suspensions"] < counted[1]["suspensions"]
    assert counted[-1]["departures"] == 0


def shorter(layer: nn.Module, result: torch.Tensor) -> Any:
    return result[:1]


def pair(layer: nn.Module, result: torch.Tensor) -> Any:
    return result, result.sum(1)


def nothing(layer: nn.Module, result: torch.Tensor) -> Any:
    return None


def detached(layer: nn.Module, result: torch.Tensor) -> Any:
    return result.detach()


def laid_otherwise(layer: nn.Module, result: torch.Tensor) -> Any:
    return result.t().contiguous().t()


@pytest.mark.parametrize("odd", [shorter, pair, nothing, detached, laid_otherwise])
@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
def test_a_departure_runs_the_step_again_and_stays_exact(
    job: Job, odd: Callable[[Any, torch.Tensor], Any], pipeline: str
) -> None:
    model = Loop([Layer(counting=True), Layer(odd), Layer(), Layer()])
    counted = compare(job, model, [1, 2, 1, 2], {"pipeline": pipeline})
    assert [one["departures"] for one in counted] == [0, 0, 0, 0, 1, 1]


def test_a_departure_within_a_module_on_another_rank(job: Job) -> None:
    inner = Loop([Layer(), Layer(nothing), Layer()])

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), inner])

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](value))

    torch.manual_seed(7)
    model = Outer().double()
    batch = torch.rand(2 * MICROBATCHES, WIDTH, dtype=torch.float64)
    expected = alone(copy.deepcopy(model), batch, 6)

    def place(module: nn.Module) -> None:
        smp.set_partition(module.layers[1], 1)  # type: ignore[index]
        for layer, rank in zip(module.layers[1].layers, [2, 0, 2], strict=True):  # type: ignore[index]
            smp.set_partition(layer, rank)

    found, counted = divided(job, model, batch, place, {"pipeline": "interleaved"}, 6)
    assert counted[-1]["departures"] == 1
    for state, other in zip(expected, found, strict=True):
        assert state.keys() == other.keys()
        for name, value in state.items():
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_a_departure_may_be_an_error_on_every_rank(job: Job) -> None:
    model = Loop([Layer(), Layer(nothing)])
    with pytest.raises(DepartureError) as caught:
        compare(job, model, [1, 2], {"on_departure": "error"})
    error = caught.value
    assert (error.rank, error.module, error.phase) == (2, "layers.1", "forward")
    assert "returned None with tensors []" in str(error)
    assert "where it had returned tensor 0 with tensors [float64[2, 4], requires grad]" in str(error)


class Remembering(Layer):
    """Gives back what it was last called with, by way of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        result = super().forward(given) + self.last  # type: ignore[operator]
        self.last.copy_(given.detach().mean(0))  # type: ignore[operator, union-attr]
        return result


def test_calls_of_a_module_that_keeps_state_are_executed_in_their_order(job: Job) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Remembering()])

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            first = self.layers[1](self.layers[0](value))
            return (first + 2 * self.layers[1](value * 3)).square().mean()

    torch.manual_seed(7)
    model = Model().double()
    batch = torch.rand(2 * MICROBATCHES, WIDTH, dtype=torch.float64)
    expected = alone(copy.deepcopy(model), batch, 6)

    def place(module: nn.Module) -> None:
        for layer, rank in zip(module.layers, [1, 2], strict=True):  # type: ignore[arg-type]
            smp.set_partition(layer, rank)

    found, counted = divided(job, model, batch, place, {"pipeline": "interleaved", "active_microbatches": 1}, 6)
    assert counted[-1]["departures"] == 0
    for state, other in zip(expected, found, strict=True):
        for name, value in state.items():
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-12, msg=name)
