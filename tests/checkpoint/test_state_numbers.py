"""State that is single numbers, or of sparse gradients: of another precision it is refused, and as it was it loads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.checkpoint import small_training
from tests.checkpoint.test_state_shapes import unchanged
from tests.frames.job import Job, in_process_ranks

Making = Callable[..., torch.optim.Optimizer]
KINDS: dict[str, Making] = {
    "Adam": functools.partial(torch.optim.Adam, amsgrad=True),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
}


class Scaled(nn.Module):
    """A matrix and a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs) * self.scale
        return out


class Training(small_training.Training):
    """A model of one rank with its optimizer."""

    def __init__(self, kind: Making, make: Callable[[], nn.Module], inputs: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.model = smp.DistributedModel(make())
        self.optimizer = smp.DistributedOptimizer(kind(self.model.parameters(), lr=0.1))
        self.inputs = inputs

    def batch(self, number: int) -> torch.Tensor:
        """The same in each step."""
        return self.inputs


def of_numbers(value: Any, is_of_elements: bool) -> Iterator[Any]:
    """A single number as no step keeps it."""
    dtypes = [torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
    if is_of_elements:
        dtypes.append(torch.float64)
    yield from (value.to(dtype) for dtype in dtypes)
    yield value.to(torch.complex64)


def of_matrices(value: Any, is_of_elements: bool) -> Iterator[Any]:
    """A matrix as no step keeps it."""
    yield from (value.double(), value.long(), value.t().contiguous(), value[0].clone(), torch.tensor(1.0))


def check(training: Training, again: Callable[[], Training], others: Any, folder: Path) -> list[str]:
    """Load each change of the state, which has to be refused, and the state itself."""
    for _ in range(2):
        training.step()
    wrong, named = [], {"model": training.model, "optimizer": training.optimizer}
    smp.save_checkpoint(folder, "good", **named)
    for parameter, state in list(training.optimizer.state.items()):
        for key, value in list(state.items()):
            if not isinstance(value, torch.Tensor) or (others is of_numbers) != (value.dim() == 0):
                continue
            for other in others(value, parameter.dim() == 0 and key not in ("step", "mu_product", "eta", "mu")):
                state[key] = other
                smp.save_checkpoint(folder, "bad", **named)
                state[key] = value
                target = again()
                into: dict[str, Any] = {"model": target.model, "optimizer": target.optimizer}
                said = unchanged(target, functools.partial(smp.resume_from_checkpoint, folder, "bad", **into))
                wrong += [f"{key} of {tuple(parameter.shape)} as {other.dtype}: {said}"] if said else []
    target = again()
    smp.resume_from_checkpoint(folder, "good", model=target.model, optimizer=target.optimizer)
    for one in (training, target):
        one.step()
    first, second = training.values(), target.values()
    return wrong + [f"{key} differs" for key in first if not torch.equal(first[key], second[key])]


def checked(make: Callable[[], Training], others: Any, folder: Path) -> list[str]:
    def main(runtime: Runtime) -> list[str]:
        return check(make(), make, others, folder)

    with in_process_ranks():
        job = Job(1)
        (found,) = job.run(main, {}, 300)
        job.close()
    assert isinstance(found, list), found
    return found


@pytest.mark.parametrize("name", KINDS)
def test_single_numbers_of_another_precision_are_refused(name: str, tmp_path: Path) -> None:
    make = functools.partial(Training, KINDS[name], Scaled, torch.ones(2, 3))
    assert checked(make, of_numbers, tmp_path) == []


def test_state_that_is_there_from_the_beginning_is_not_missing(tmp_path: Path) -> None:
    def main(runtime: Runtime) -> str:
        training = Training(torch.optim.Adagrad, Scaled, torch.ones(2, 3))
        training.step()
        named: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
        state = training.optimizer.state.pop(training.model.module.scale)
        smp.save_checkpoint(tmp_path, "bad", **named)
        training.optimizer.state[training.model.module.scale] = state
        return unchanged(training, functools.partial(smp.resume_from_checkpoint, tmp_path, "bad", **named))

    with in_process_ranks():
        job = Job(1)
        assert job.run(main, {}, 300) == [""]
        job.close()


def test_state_of_sparse_gradients_is_looked_at(tmp_path: Path) -> None:
    table = functools.partial(nn.Embedding, 5, 3, sparse=True)
    make = functools.partial(Training, torch.optim.SparseAdam, table, torch.tensor([1, 2, 3, 1]))
    assert checked(make, of_matrices, tmp_path) == []
