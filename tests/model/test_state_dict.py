"""State dicts of a divided model are those of the whole one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from shardwright.errors import PartitionError
from shardwright.model import state_dict as state_dicts
from shardwright.model.ownership import Ownership, apply_ownership
from shardwright.model.sentinel import is_sentinel
from shardwright.model.state_dict import (
    PARTIAL_KEY,
    load_state_dict,
    local_state_dict,
    make_whole_on_cpu,
    merged,
    state_dict,
)
from shardwright.partition.decision import Decision
from shardwright.partition.tree import ModelTree
from torch import nn

from tests.model.gathering import gathering


class Counting(nn.Linear):
    """Has extra state beside its tensors."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Sequential(Counting(), nn.BatchNorm1d(4), Counting())
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.body.register_buffer("scratch", torch.randn(2), persistent=False)
        self.body[0].count = self.body[2].count = seed


def share(model: nn.Module, pp_rank: int, *remote: str) -> Ownership:
    tree = ModelTree.of(model)
    ranks = {entry.path: int(entry.path.startswith(remote)) for entry in tree.modules}
    return apply_ownership(model, Decision.of(tree, ranks, 2), pp_rank)


def pair(seed: int, *remote: str) -> list[Ownership]:
    shares = [share(Model(seed), rank, *remote) for rank in range(2)]
    # What is remote may have gone stale here; only its owner's counts.
    shares[0].module.body[0].count = -1
    return shares


def parts(shares: list[Ownership]) -> list[OrderedDict[str, Any]]:
    return [copy.deepcopy(local_state_dict(s.module, s)) for s in shares]


def check_holds(shares: list[Ownership], expected: nn.Module) -> None:
    whole = {**dict(expected.named_parameters()), **{n: b for n, b in expected.named_buffers() if n != "body.scratch"}}
    seen = set()
    for s in shares:
        for name, tensor in [*s.local_named_parameters(), *s.local_named_buffers()]:
            if name in whole:
                torch.testing.assert_close(tensor, whole[name].to(tensor.dtype), rtol=0, atol=0)
                seen.add(name)
    assert seen == set(whole)
    assert shares[1].module.body[0].count == expected.body[0].count
    assert all(s.sentinels == {n: v for n, v in s.sentinels.items() if is_sentinel(v)} for s in shares)
    for s in shares:
        s.check(s.module)


def test_parts_are_marked_and_merge_into_the_whole_in_its_order() -> None:
    shares = pair(1, "body")
    found = parts(shares)
    assert all(part[PARTIAL_KEY] is True for part in found)
    assert set(found[0]) - {PARTIAL_KEY} == {"embedding.weight", "head.weight"}
    expected = Model(1).state_dict()
    for s in shares:
        with gathering(state_dicts, lambda mine: found):
            whole = state_dict(s.module, s)
        assert list(whole) == list(expected)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(whole[key], value), key
            else:
                assert whole[key] == value
    with gathering(state_dicts, lambda mine: []):
        assert state_dict(shares[0].module, shares[0]) == {}
    with (
        gathering(state_dicts, lambda mine: [found[0]]),
        pytest.raises(PartitionError, match=r"no rank .* 'body\.0\.weight'"),
    ):
        state_dict(shares[0].module, shares[0])


def test_a_model_that_is_not_divided_has_its_own_state_dict() -> None:
    model = Model()
    assert list(state_dict(model)) == list(model.state_dict())
    assert local_state_dict(model)[PARTIAL_KEY] is True


@pytest.mark.parametrize("marker", [None, False])
def test_a_whole_dict_loads_into_every_share(marker: bool | None) -> None:
    source = Model(5)
    state = source.state_dict()
    if marker is not None:
        state[PARTIAL_KEY] = marker
    shares = pair(1, "body")
    for s in shares:
        keys = load_state_dict(s.module, state, ownership=s)
        assert keys == ([], [])
    check_holds(shares, source)


def test_parts_of_another_partition_are_merged_before_loading() -> None:
    source = pair(5, "embedding", "head")
    saved = parts(source)
    shares = pair(1, "body")
    for rank, s in enumerate(shares):
        with gathering(state_dicts, lambda mine: saved):
            load_state_dict(s.module, saved[rank], ownership=s)
    check_holds(shares, _with_count(Model(5), -1))


def _with_count(model: Model, count: int) -> Model:
    model.body[0].count = count
    return model


def test_parts_of_the_same_partition_load_without_merging() -> None:
    saved = parts(pair(5, "body"))
    shares = pair(1, "body")
    for rank, s in enumerate(shares):
        with gathering(state_dicts, lambda mine: pytest.fail("merged")):
            keys = load_state_dict(s.module, saved[rank], same_partition_load=True, ownership=s)
        assert keys == ([], [])
    check_holds(shares, Model(5))
    with pytest.raises(RuntimeError, match=r'Missing key.*"body\.0\.weight"'):
        load_state_dict(shares[1].module, saved[0], same_partition_load=True, ownership=shares[1])


def test_keys_are_counted_on_the_whole_model_alike_on_every_rank() -> None:
    state = Model(5).state_dict()
    del state["body.1.running_mean"], state["embedding.weight"]
    state["body.9.weight"] = torch.ones(1)
    plain = Model(1)
    expected = plain.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError) as torchs:
        plain.load_state_dict(state)
    for s in pair(1, "body"):
        found = load_state_dict(s.module, state, strict=False, ownership=s)
        assert found.missing_keys == expected.missing_keys
        assert found.unexpected_keys == expected.unexpected_keys
        with pytest.raises(RuntimeError) as ours:
            load_state_dict(s.module, state, ownership=s)
        assert str(ours.value) == str(torchs.value)
        assert all(is_sentinel(v) for v in s.sentinels.values())
        s.check(s.module)


def test_a_wrong_shape_is_an_error_on_every_rank() -> None:
    state = Model(5).state_dict()
    state["body.0.weight"] = torch.ones(3, 3)
    for s in pair(1, "body"):
        with pytest.raises(RuntimeError, match=r"size mismatch for body\.0\.weight"):
            load_state_dict(s.module, state, ownership=s)


def test_loading_does_not_untie_or_replace_parameters() -> None:
    shares = pair(1, "body")
    model = shares[0].module
    weight, sentinel = model.embedding.weight, model.body[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_state_dict(model, Model(5).state_dict(), ownership=shares[0])
    assert model.embedding.weight is model.head.weight is weight
    assert model.body[0].weight is sentinel
    assert optimizer.param_groups[0]["params"][0] is weight


def test_a_merge_takes_the_first_part_of_a_buffer_held_twice() -> None:
    first = {"mask": torch.ones(1), PARTIAL_KEY: True}
    assert merged([first, {"mask": torch.zeros(1)}]) == {"mask": first["mask"]}


def test_all_values_can_be_brought_to_every_rank() -> None:
    shares = pair(1, "body")
    held = [
        {
            "parameters": {n: p.detach().clone() for n, p in s.local_named_parameters()},
            "buffers": {n: b.clone() for n, b in s.local_named_buffers()},
        }
        for s in shares
    ]
    expected = Model(1)
    for s in shares:
        with gathering(state_dicts, lambda mine: held):
            make_whole_on_cpu(s.module)
        assert not any(is_sentinel(t) for t in [*s.module.parameters(), *s.module.buffers()])
        assert s.module.head.weight is s.module.embedding.weight
        for (name, found), (_, value) in zip(s.module.named_parameters(), expected.named_parameters(), strict=True):
            assert torch.equal(found, value), name
            assert found.requires_grad
        assert torch.equal(s.module.body.scratch, expected.body.scratch)
