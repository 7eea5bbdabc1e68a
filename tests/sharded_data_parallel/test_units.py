"""Which parameters are sharded, and which are gathered together."""

from __future__ import annotations

import pytest
import torch
from shardwright.sharded_data_parallel.groups import by_host, is_two_level
from shardwright.sharded_data_parallel.units import buckets, choose, may_gather_ahead, units
from torch import nn

from tests.sharded_data_parallel.problems import blocks
from tests.sharded_data_parallel.running import case, run

_BLOCK = 2 * (32 * 32 + 32)


def test_small_and_sparse_parameters_stay_whole() -> None:
    model = nn.ModuleDict(
        {
            "small": nn.Linear(3, 3),
            "large": nn.Linear(30, 30),
            "sparse": nn.Embedding(50, 30, sparse=True),
            "other dtype": nn.Linear(20, 20, dtype=torch.bfloat16),
            "scripted": torch.jit.script(nn.Linear(30, 30)),  # in which no shard can take a parameter's place
        }
    )
    model.scale = nn.Parameter(torch.ones(()))
    model.transposed = nn.Parameter(torch.ones(40, 50).t())
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = [names[one] for one in choose(model, list(model.parameters()), 31)]
    assert found == ["large.weight"]
    found = [names[one] for one in choose(model, list(model.parameters()), 0)]
    assert found == ["small.weight", "small.bias", "large.weight", "large.bias"]


def test_units_are_what_stands_in_lists() -> None:
    model = nn.Module()
    model.body, model.head = blocks(), nn.Linear(5, 5)
    sharded = set(model.parameters())
    found = units(model, sharded, 10**9)
    assert found == [*model.body, model]
    model.head.weight = model.body[5].weight = nn.Parameter(torch.ones(5, 32))
    assert units(model, set(model.parameters()), 10**9) == [*model.body[:5], model]


def test_large_units_are_divided() -> None:
    model = blocks()
    sharded = set(model.parameters())
    divided = [part for i in range(1, 5) for part in (model[i][0], model[i][2], model[i])]
    assert units(model, sharded, _BLOCK - 1) == [model[0], *divided, model[5], model]
    attention = nn.Sequential(nn.MultiheadAttention(32, 4))
    assert units(attention, set(attention.parameters()), 1) == [attention[0], attention]


def test_buckets_have_at_most_so_many_elements() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 4, 9, 1, 2, 3)]
    sizes = [[one.numel() for one in together] for together in buckets(parameters, 7)]
    assert sizes == [[3, 4], [9], [1, 2, 3]]
    assert buckets([], 7) == []


@pytest.mark.parametrize(
    ("hosts", "is_used"),
    [("aabb", True), ("aaaa", False), ("abab", False), ("aaab", False), ("abcd", False), ("aaabbb", True)],
)
def test_two_levels_need_equal_hosts_in_order(hosts: str, is_used: bool) -> None:
    ranks = [2 * place for place in range(len(hosts))]
    found = by_host(ranks, lambda rank: hosts[rank // 2])
    assert is_two_level(found, ranks) == is_used


def test_a_unit_is_gathered_when_it_is_used() -> None:
    run(2, case("gathers", stage=3, units=6, each_microbatch=2))
    run(2, *(case("gathers", stage=stage, units=6, each_microbatch=1) for stage in (1, 2)))


def test_the_next_unit_is_gathered_ahead_within_the_limit() -> None:
    assert may_gather_ahead([3, 2, 2, 7, 1], 9) == [True, True, False, False, True]
    assert may_gather_ahead([3, 2, 2, 7, 1], 5) == [False, False, False, False, True]
    assert may_gather_ahead([5], 1) == [True]


def test_no_unit_is_gathered_ahead_on_cpus() -> None:
    run(2, case("no_prefetching"))
