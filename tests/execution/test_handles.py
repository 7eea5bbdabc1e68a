"""Results that stay where they are made until somebody needs them."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.frames.remote import is_remote
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn

from tests.frames.job import Job, job_fixture

WIDTH = 64  # so that a batch of 32 is more than what comes with an answer anyway
BATCH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH) / WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.tanh() @ self.weight


class Writing(Layer):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value.mul_(2)
        return value @ self.weight


class Model(nn.Module):
    """Layers, and what the rank that calls them does with each one's result before the next."""

    def __init__(self, use: Callable[["Model", int, torch.Tensor], torch.Tensor], writing: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Writing() if writing else Layer(), Layer()])
        self.use = use

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            value = self.use(self, number, layer(value))
        return value.square().mean()


job = job_fixture(3)


def run(
    job: Job, original: nn.Module, steps: int = 1, **settings: Any
) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    """The gradients of the last step, and how many bytes each rank sent in each step; exact or an error."""
    batch = torch.rand(2 * BATCH, WIDTH, dtype=torch.float64)
    alone = copy.deepcopy(original)
    for part in batch.chunk(2):
        (alone(part) / 2).backward()

    def main(runtime: Runtime) -> tuple[dict[str, torch.Tensor], list[float]]:
        module = copy.deepcopy(original)
        for layer, rank in zip(module.layers, [1, 2, 1, 1], strict=True):  # type: ignore[arg-type]
            smp.set_partition(layer, rank)
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> torch.Tensor:
            loss = model(part)
            model.backward(loss)
            return loss

        train(batch)  # divides the model
        sent = []
        for _ in range(steps):
            model.zero_grad()
            before = smp.stats()["efficiency"]["total"]["sent_bytes"]
            train(batch)
            sent.append(smp.stats()["efficiency"]["total"]["sent_bytes"] - before)
        return {name: p.grad for name, p in module.named_parameters() if not is_sentinel(p)}, sent

    found: dict[str, torch.Tensor] = {}
    moved = []
    keys = {"auto_partition": False, "default_partition": 0, "microbatches": 2, **settings}
    for result in job.run(main, keys):
        if isinstance(result, BaseException):
            raise result
        found |= result[0]
        moved.append(result[1])
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)
    assert job.rests
    assert all(runtime.server.stats()["held_responses"] == 0 for runtime in job.runtimes)
    return found, moved


def model(use: Callable[[Model, int, torch.Tensor], torch.Tensor], writing: bool = False) -> Model:
    torch.manual_seed(3)
    return Model(use, writing).double()


def untouched(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
    return value


def test_what_the_caller_only_hands_on_does_not_pass_by_it(job: Job) -> None:
    _, direct = run(job, model(untouched))
    _, around = run(job, model(untouched), tensor_handles=False)
    activation = BATCH * WIDTH * 8 * 2  # of both microbatches
    # Rank 0 sends the arguments of four layers, or of the first; and the gradient of what the last one gives.
    assert around[0][0] == 5 * activation
    assert direct[0][0] == 2 * activation
    assert sum(sent[0] for sent in direct) <= 0.7 * sum(sent[0] for sent in around)


@pytest.mark.parametrize("use", [lambda model, number, value: value, lambda model, number, value: value + 1])
def test_static_mode_alone_moves_no_more_than_dynamic_mode(
    job: Job, use: Callable[[Model, int, torch.Tensor], torch.Tensor]
) -> None:
    _, dynamic = run(job, model(use), steps=5)
    _, static = run(job, model(use), steps=5, static_mode=True, static_steps=1)
    assert [sent[-1] for sent in static] == [sent[-1] for sent in dynamic]


def test_what_the_caller_uses_comes_with_the_answer_from_the_next_step_on(job: Job) -> None:
    counted: list[int] = []

    def uses(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
        counted.append(is_remote(value))
        return value + 1

    run(job, model(uses), steps=3)
    # In the first step each result is remote when it is used, for all microbatches alike: one that came with its answer
    # would overtake an earlier one. Then it comes with the answer.
    assert sum(counted) == 2 * 4
    assert not any(counted[-16:])


def shown(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
    assert value.shape == (BATCH, WIDTH)
    assert value.requires_grad == torch.is_grad_enabled() != value.is_leaf
    assert "tensor(" in repr(value)
    assert value.detach().sum().item() == float(value.detach().sum())
    return value


def changed(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
    return value.mul_(1.5)


def kept(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
    if number == 0:
        model.first = value
    return value + model.first if number == 2 else value


def hooked(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
    value.register_hook(lambda gradient: 2 * gradient)
    return value


def twice(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
    return value + model.layers[0](value) if number == 1 else value


def detached(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
    return value.detach() if number == 1 else value


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (value,) = ctx.saved_tensors
        return 3 * value**2 * gradient


def custom(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
    return Cubed.apply(value)


def checkpointed(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(torch.sin, value, use_reentrant=False)


def mapped(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.sin)(value)


def collected(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
    return torch.stack([value, torch.as_tensor(value)]).sum(0)


@pytest.mark.parametrize(
    "use", [shown, changed, kept, hooked, twice, detached, custom, checkpointed, mapped, collected]
)
@pytest.mark.parametrize("static", [False, True])
def test_every_use_finds_the_values(
    job: Job, use: Callable[[Model, int, torch.Tensor], torch.Tensor], static: bool
) -> None:
    settings = {"static_mode": True, "fast_mode": True, "static_steps": 1} if static else {}
    run(job, model(use), steps=3, **settings)


def test_a_module_may_write_to_what_another_one_made(job: Job) -> None:
    run(job, model(untouched, writing=True), steps=2)


def test_a_result_that_outlives_its_task_is_a_tensor_like_any_other(job: Job) -> None:
    def keeps(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
        if number == 0:
            found.append(value)
        return value

    found: list[torch.Tensor] = []
    run(job, model(keeps))
    assert len(found) >= 4
    assert all(type(value) is torch.Tensor for value in found)
    assert all(value.isfinite().all() for value in found)


def test_another_thread_that_comes_first_is_told_so(job: Job) -> None:
    def elsewhere(model: Model, number: int, value: torch.Tensor) -> torch.Tensor:
        errors: list[BaseException] = []

        def use() -> None:
            try:
                value.sum()
            except FrameError as error:
                errors.append(error)

        if is_remote(value):
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
            raise errors[0]
        return value

    with pytest.raises((FrameError, RemoteError), match="which rank 1 owns, was used for the first time outside"):
        run(job, model(elsewhere))
