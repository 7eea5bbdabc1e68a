"""What modules keep changes once, and the second computation finds it as the first did."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.activation_checkpointing import isolation
from shardwright.errors import FrameError
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.activation_checkpointing.running import check
from tests.frames.job import Job, job_fixture
from tests.state.keepers import KEEPERS, Keeper
from tests.state.running import MODES, SIZES
from tests.state.test_keepers import PLACES, Chain

job = job_fixture(2)


def mark_keepers(model: nn.Module) -> None:
    for keeper in model.keepers:  # type: ignore[union-attr]
        smp.set_activation_checkpointing(keeper)


@pytest.mark.covering(2)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("half", [0, 1])
def test_modules_that_keep_something_are_exact(job: Job, half: int, mode: str, size: str, places: str) -> None:
    torch.manual_seed(5)
    settings = {"active_microbatches": 4, **MODES[mode]}
    check(job, Chain(SIZES[size][1], KEEPERS[half::2]), PLACES[places], mark_keepers, settings, size)


@pytest.mark.parametrize("keeper", KEEPERS)
def test_each_keeper_alone_is_exact(job: Job, keeper: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(5)
    check(job, Chain(SIZES["large"][1], [keeper]), PLACES["away"], mark_keepers, MODES["fast"], "large")


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_model_whose_modules_keep_something(job: Job, mode: str) -> None:
    torch.manual_seed(5)
    model = Chain(SIZES["small"][1], KEEPERS[::3])
    check(job, model, PLACES["away"], smp.set_activation_checkpointing, MODES[mode])


class Large(Keeper):
    """A buffer of more than 64 KiB, and a weight that the forward itself changes."""

    def keep(self, width: int) -> None:
        self.register_buffer("table", torch.zeros(200, width))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.table.mul_(0.5).add_(x.mean(0))
            self.frozen.mul_(0.75)
        return self.scaled(x) * self.table[0].clone() * self.frozen.clone()


def test_large_tensors_that_every_forward_changes(job: Job) -> None:
    torch.manual_seed(5)
    check(job, Chain(SIZES["large"][1], [Large, Large]), PLACES["away"], mark_keepers, size="large")


class KeepsPart(Keeper):
    """Keeps a part of a tensor that it writes to afterwards, which torch then lets nobody use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        twice = self.scaled(x) * 2
        self.part, _ = twice.chunk(2, -1)
        return twice.mul_(0.5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_a_part_of_a_tensor_that_was_written_to_is_kept(job: Job, size: str, mode: str) -> None:
    torch.manual_seed(5)
    check(job, Chain(SIZES[size][1], [KeepsPart]), PLACES["away"], mark_keepers, MODES[mode], size)


class Normed(nn.Module):
    """Spectral normalization, whose vectors every forward improves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.norm = spectral_norm(nn.Linear(width, width)), nn.BatchNorm1d(width, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.inner(x)))


def test_spectral_and_batch_normalization(job: Job) -> None:
    torch.manual_seed(5)
    check(job, Chain(SIZES["small"][1], [Normed, Normed]), PLACES["away"], mark_keepers)


class Drawing(nn.Module):
    """Draws from generators of Python and NumPy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numpy = pytest.importorskip("numpy")
        return torch.exp(x * random.random()) + torch.tanh(x) * float(numpy.random.random())


def test_random_numbers_of_python_and_numpy_are_the_same_in_the_second_computation() -> None:
    numpy = pytest.importorskip("numpy")

    def run(call: Callable[..., Any]) -> list[Any]:
        random.seed(3)
        numpy.random.seed(3)
        x = torch.ones(3, requires_grad=True)
        call(Drawing(), x).sum().backward()
        assert x.grad is not None
        return [*x.grad.tolist(), random.random(), numpy.random.random()]

    assert run(lambda module, x: module(x)) == run(smp.checkpoint)


class Late(nn.Module):
    """Writes to a large buffer from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(500, 50))
        self.weight, self.calls = nn.Parameter(torch.ones(50)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = torch.tanh(x * self.weight * self.table[0].clone())
        if self.calls > 2:
            self.table.mul_(2)
        return y


def test_a_large_buffer_that_changes_later_is_an_error_once_and_then_copied() -> None:
    module, plain = Late(), Late()
    for call in range(5):
        x = torch.ones(50)
        module.zero_grad()
        plain.zero_grad()
        plain(x).sum().backward()
        result = smp.checkpoint(module, x).sum()
        if call == 2:
            with pytest.raises(FrameError, match=r"'table' of Late, of shape \(500, 50\), was written to after"):
                result.backward()
            continue
        result.backward()
        assert torch.equal(module.weight.grad, plain.weight.grad)  # type: ignore[arg-type]
        assert torch.equal(module.table, plain.table)
    assert module.calls == 5


def test_tensors_too_large_to_be_copied_for_learning_change_with_an_error_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_LEARNING_BYTES", 1000)
    module = nn.Embedding(50, 50, max_norm=0.5)
    index = torch.arange(9)
    with pytest.raises(FrameError, match=r"'weight' of Embedding, of shape \(50, 50\), was written to after"):
        smp.checkpoint(module, index).sum().backward()
    plain = copy.deepcopy(module)
    for one, call in ((module, smp.checkpoint), (plain, lambda module, index: module(index))):
        one.zero_grad()
        call(one, index + 20).square().sum().backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)  # type: ignore[arg-type]
    assert torch.equal(module.weight, plain.weight)


def test_a_weight_that_is_updated_before_the_backward_is_an_error() -> None:
    module = nn.Linear(3, 3)
    result = smp.checkpoint(module, torch.ones(2, 3)).sum()
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(FrameError, match=r"'weight' of Linear, of shape \(3, 3\), was written to after"):
        result.backward()


class Registering(nn.Module):
    """Registers a buffer and a child in its first forward, and replaces a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.ones(3)), [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.full((3,), 2.0), persistent=False)
            self.activation = nn.Tanh()
        self.kept = [*self.kept, len(self.kept)]
        self.eval()
        self.train()
        return torch.as_tensor(self.activation(x * self.weight * self.made) * len(self.kept))


def test_what_a_forward_registers_is_registered_once() -> None:
    def run(call: Callable[..., Any]) -> list[Any]:
        module = Registering()
        for _ in range(2):
            call(module, torch.arange(3.0)).sum().backward()
        assert module.weight.grad is not None
        return [module.weight.grad.tolist(), module.kept, [*dict(module.named_modules())], [*module.state_dict()]]

    assert run(lambda module, x: module(x)) == run(smp.checkpoint)


def test_a_mode_that_changes_before_the_backward_does_not_matter() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Tanh())
    x = torch.randn(6, 4)

    def gradient(call: Callable[..., Any]) -> torch.Tensor:
        torch.manual_seed(1)
        module.train()
        module.zero_grad()
        result = call(module, x).square().sum()
        module.eval()
        result.backward()
        assert not module.training
        weight: Any = module[0].weight
        return torch.as_tensor(weight.grad.clone())

    assert torch.equal(gradient(lambda module, x: module(x)), gradient(smp.checkpoint))


def test_weights_of_one_call_are_those_of_its_second_computation() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    others = {name: (value * 2).detach().requires_grad_() for name, value in module.named_parameters()}
    x = torch.randn(3, 4)

    class Around(nn.Module):
        def __init__(self, call: Callable[..., Any]) -> None:
            super().__init__()
            self.inner, self.call = module, call

        def forward(self, x: torch.Tensor) -> Any:
            return self.call(self.inner, x)

    found = []
    for call in (lambda module, x: module(x), smp.checkpoint):
        given = {f"inner.{name}": value for name, value in others.items()}
        result = torch.func.functional_call(Around(call), given, (x,))
        found.append(torch.autograd.grad(result.square().sum(), list(others.values())))
    assert all(map(torch.equal, *found))
