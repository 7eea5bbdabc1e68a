"""State dicts of shards: a function for each case, which the ranks of a running job call."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.optimizer_sharding.problems import OPTIMIZERS, groups_of

from .problems import Pair, built, close


def weights() -> None:
    """State dicts are those of one process, and load before and after the model is divided."""
    pair = Pair("blocks")
    pair.run(2)
    state = copy.deepcopy(pair.model.state_dict())
    expected = copy.deepcopy(pair.reference.module.state_dict())
    assert list(state) == list(expected)
    for name, value in state.items():
        assert type(value) is torch.Tensor
        close(value, expected[name], name)
    local = copy.deepcopy(pair.model.local_state_dict())
    assert local["_smp_is_partial"]
    for name in local.keys() & expected.keys():
        close(local[name], expected[name], name)
    pair.run(1, first=2)
    kept = copy.deepcopy(pair.reference.module.state_dict())
    pair.model.load_state_dict(state)
    pair.reference.module.load_state_dict(expected)
    pair.check("after loading")
    pair.run(2, first=3)
    found = pair.model.load_state_dict({**kept, "more": torch.zeros(1)}, strict=False)
    assert found.unexpected_keys == ["more"]
    assert not found.missing_keys
    with pytest.raises(RuntimeError, match="size mismatch"):
        pair.model.load_state_dict({name: torch.zeros(3, 3) for name in kept})
    other = Pair("blocks")
    other.model.load_state_dict(kept)
    other.reference.module.load_state_dict(kept)
    other.run(2)
    pair.model.load_state_dict(local)
    pair.reference.module.load_state_dict(expected)
    pair.check("after loading a part")


def optimizers(optimizer: str) -> None:
    """State dicts of optimizers are those of one process, and load on both sides."""
    pair = Pair("blocks", optimizer)
    pair.run(2)
    weights = copy.deepcopy(pair.model.state_dict())
    state = copy.deepcopy(pair.optimizer.state_dict())
    expected = copy.deepcopy(pair.reference.optimizer.state_dict())
    assert state["state"].keys() == expected["state"].keys()
    for number, entry in expected["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                close(state["state"][number][key].double(), value.double(), f"{key} of parameter {number}")
    module = built("blocks")
    OPTIMIZERS[optimizer](groups_of(module.parameters())).load_state_dict(state)
    pair.run(2, first=2)
    for given in (state, expected):
        for fresh in (False, True):
            one = Pair("blocks", optimizer) if fresh else pair
            one.model.load_state_dict(weights)
            one.reference.module.load_state_dict(weights)
            one.optimizer.load_state_dict(copy.deepcopy(given))
            one.reference.optimizer.load_state_dict(copy.deepcopy(expected))
            one.run(2, first=2)
    partial = pair.optimizer.local_state_dict()
    pair.optimizer.load_state_dict(partial)
    pair.run(1, first=4)
