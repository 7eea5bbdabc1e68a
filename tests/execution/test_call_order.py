"""Static mode where calls nest over ranks: whatever is asked for early, no call waits for a later one."""

import pytest
import torch
from torch import nn

from tests.execution.call_trees import Caller, Tree, Use, difference, draw, try_seeds
from tests.frames.job import Job, job_fixture

SEEDS = range(50)


job = job_fixture(2)


def caller(width: int, *modules: nn.Module) -> Caller:
    return Caller(width, [Use(module) for module in modules])


@pytest.mark.parametrize(("rows", "width"), [(2, 4), (40, 160)])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_later_call_of_a_module_does_not_hold_up_an_earlier_one(
    job: Job, rows: int, width: int, microbatches: int
) -> None:
    torch.manual_seed(3)
    shared = caller(width)
    model = caller(width, caller(width, caller(width), caller(width, shared)), caller(width, shared)).double()
    places = {"called.0": 1, "called.0.called.0": 0, "called.0.called.1": 0, "called.0.called.1.called.0": 1}
    batch = torch.rand(rows * microbatches, width, dtype=torch.float64)
    tree = Tree(model, places, 2, batch, {"microbatches": microbatches}, steps=4)
    assert difference(job, tree) is None


@pytest.mark.parametrize(("rows", "width"), [(2, 4), (40, 160)])
def test_a_later_call_of_another_module_does_not_either(job: Job, rows: int, width: int) -> None:
    torch.manual_seed(3)
    model = caller(width, caller(width, caller(width, caller(width))), caller(width)).double()
    places = {"called.0": 1, "called.0.called.0": 0, "called.0.called.0.called.0": 1, "called.1": 1}
    batch = torch.rand(rows, width, dtype=torch.float64)
    assert difference(job, Tree(model, places, 2, batch, {"microbatches": 1}, steps=4)) is None


def test_random_calls_over_ranks_are_exact_and_come_to_an_end() -> None:
    trees = [draw(seed) for seed in SEEDS]
    assert {tree.ranks for tree in trees} == {2, 3}
    assert sum(len(tree.places) > 4 for tree in trees) > len(trees) / 2
    found = try_seeds(SEEDS)
    assert len(found["exact"]) == len(SEEDS), found
