"""An optimizer over a divided model is, over all its ranks, the optimizer of the whole model."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from shardwright.errors import ConfigError
from shardwright.model.ownership import Ownership, apply_ownership
from shardwright.optimizer import DistributedOptimizer, clip, clip_grad_norm_
from shardwright.optimizer.clip import gradient_norms
from shardwright.optimizer.layout import merged
from shardwright.partition.decision import Decision
from shardwright.partition.tree import ModelTree
from torch import nn

from tests.model.gathering import gathering


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(index)))


def wrapped(module: nn.Module) -> Any:
    """What an optimizer sees of the distributed model that has this module."""
    return SimpleNamespace(module=module)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.01}]


def divide(model: nn.Module, pp_rank: int, *remote: str) -> Ownership:
    tree = ModelTree.of(model)
    ranks = {entry.path: int(entry.path.startswith(remote)) if remote else 0 for entry in tree.modules}
    return apply_ownership(model, Decision.of(tree, ranks, 2), pp_rank)


class Pair:
    """The same model and optimizer three times: whole, and as each of two ranks."""

    def __init__(self, build: Any, *remote: str, early: bool = True) -> None:
        self.whole = Model()
        self.whole_optimizer = build(self.whole)
        self.models = [Model(), Model()]
        self.optimizers = []
        for rank, model in enumerate(self.models):
            if early:
                optimizer = DistributedOptimizer(build(model))
                divide(model, rank, *remote)
                optimizer.localise(wrapped(model))
            else:
                divide(model, rank, *remote)
                optimizer = DistributedOptimizer(build(model))
            self.optimizers.append(optimizer)
        for optimizer in self.optimizers:
            optimizer._gather = lambda value: [other.local_state_dict() for other in self.optimizers]

    def backward(self) -> None:
        self.whole_optimizer.zero_grad()
        self.whole(torch.arange(6)).square().mean().backward()
        gradients = {name: p.grad for name, p in self.whole.named_parameters()}
        for model in self.models:
            for name, parameter in model.named_parameters():
                if type(parameter) is nn.Parameter:
                    parameter.grad = gradients[name].clone()

    def step(self) -> None:
        self.backward()
        self.whole_optimizer.step()
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self) -> None:
        expected = dict(self.whole.named_parameters())
        seen = set()
        for model in self.models:
            for name, parameter in model.named_parameters():
                if type(parameter) is nn.Parameter:
                    assert torch.equal(parameter, expected[name]), name
                    seen.add(name)
        assert seen == set(expected)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups_of(model), lr=0.1, momentum=0.9)


def adamw(model: nn.Module, **keys: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=0.1, **keys)


def test_hooks_are_called_once_a_step_also_after_a_load() -> None:
    parameter, calls = nn.Parameter(torch.ones(3)), list[str]()
    optimizer: Any = DistributedOptimizer(torch.optim.Adam([parameter]))
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    parameter.grad = torch.ones(3)
    for _ in range(2):
        calls.clear()
        optimizer.step()
        assert calls == ["before", "after"]
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "build",
    [
        sgd,
        adamw,
        lambda model: adamw(model, foreach=True),
        lambda model: adamw(model, fused=True),
        lambda model: torch.optim.Adagrad(groups_of(model)),
        lambda model: torch.optim.RMSprop(model.named_parameters(), momentum=0.5),
        lambda model: torch.optim.Adafactor(model.parameters()),
    ],
)
def test_two_ranks_step_as_one_process(build: Any, early: bool) -> None:
    pair = Pair(build, "body", early=early)
    for _ in range(3):
        pair.step()
    pair.check()


def test_it_is_the_same_object_with_the_same_groups() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.1)
    distributed = DistributedOptimizer(optimizer)
    assert distributed is optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, DistributedOptimizer)
    assert type(optimizer).__name__ == "AdamW"
    assert repr(optimizer).startswith("AdamW (")
    assert DistributedOptimizer(optimizer) is optimizer
    divide(model, 1, "body")
    optimizer.localise(wrapped(model))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def test_an_empty_group_stays_and_learning_rates_are_scheduled_in_it() -> None:
    for scheduled_first in (True, False):
        model = Model()
        optimizer = DistributedOptimizer(sgd(model))
        if scheduled_first:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        divide(model, 0, "body")
        optimizer.localise(wrapped(model))
        if not scheduled_first:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
        optimizer.step()
        scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]


def test_a_scheduler_that_was_created_before_counts_the_steps_of_the_distributed_optimizer() -> None:
    model = Model()
    plain = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        optimizer = DistributedOptimizer(plain)
        divide(model, 0, "body")
        optimizer.localise(wrapped(model))
        with mock.patch.object(type(optimizer), "step") as step:
            optimizer.step()
        step.assert_called_once()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]


@pytest.mark.parametrize(
    "name",
    [
        "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
        "SGD", "SparseAdam",
    ],
)  # fmt: skip
def test_a_stage_without_parameters_can_step(name: str) -> None:
    model = Model()
    optimizer = DistributedOptimizer(getattr(torch.optim, name)(model.parameters(), lr=0.1))
    divide(model, 1)
    optimizer.localise(wrapped(model))
    assert [len(group["params"]) for group in optimizer.param_groups] == [0]
    assert optimizer.step() is None
    assert optimizer.step(lambda: torch.tensor(2.0)) == 2.0
    optimizer.zero_grad()
    assert optimizer.local_state_dict()["state"] == {}


def test_state_of_other_ranks_is_dropped_at_the_division() -> None:
    model = Model()
    optimizer = DistributedOptimizer(adamw(model))
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 5
    share = divide(model, 0, "body")
    optimizer.localise(wrapped(model))
    assert list(optimizer.state) == list(share.local_parameters())


@pytest.mark.parametrize("build", [sgd, adamw, lambda model: torch.optim.Adam(model.named_parameters())])
def test_the_merged_state_dict_is_that_of_the_undistributed_optimizer(build: Any) -> None:
    pair = Pair(build, "body")
    for _ in range(2):
        pair.step()
    expected = pair.whole_optimizer.state_dict()
    for optimizer in pair.optimizers:
        found = optimizer.state_dict()
        assert found.keys() == expected.keys()
        assert found["param_groups"] == expected["param_groups"]
        assert list(found["state"]) == list(expected["state"])
        for number, state in expected["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(found["state"][number][key], value, rtol=0, atol=0)
    fresh = build(pair.whole)
    fresh.load_state_dict(pair.optimizers[0].state_dict())
    part = pair.optimizers[0].local_state_dict()
    assert part["_smp_is_partial"] is True
    assert part["param_groups"] == expected["param_groups"]
    assert set(part["state"]) < set(expected["state"])


@pytest.mark.parametrize("partial", [True, False])
def test_a_loaded_state_dict_continues_exactly(partial: bool) -> None:
    pair = Pair(adamw, "body")
    for _ in range(2):
        pair.step()
    saved = [copy.deepcopy(o.local_state_dict() if partial else o.state_dict()) for o in pair.optimizers]
    # Another division than the one it was saved from.
    again = Pair(adamw, "embedding", "head")
    for model in [again.whole, *again.models]:
        for name, parameter in model.named_parameters():
            if type(parameter) is nn.Parameter:
                parameter.data.copy_(dict(pair.whole.named_parameters())[name])
    again.whole_optimizer.load_state_dict(pair.whole_optimizer.state_dict())
    for rank, optimizer in enumerate(again.optimizers):
        optimizer._gather = lambda value: saved
        optimizer.load_state_dict(saved[rank])
    for _ in range(2):
        again.step()
    again.check()


def test_a_state_dict_of_another_optimizer_is_refused_in_torchs_words() -> None:
    pair = Pair(sgd, "body")
    other = torch.optim.SGD(Model().parameters(), lr=0.1).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        pair.optimizers[0].load_state_dict(other)
    with pytest.raises(ValueError, match="doesn't match the size"):
        pair.optimizers[0].load_state_dict(torch.optim.SGD(groups_of(nn.Linear(2, 2)), lr=0.1).state_dict())


def test_a_group_added_after_the_division_holds_local_parameters_only() -> None:
    model = Model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.embedding.parameters(), lr=0.1))
    share = divide(model, 1, "body")
    optimizer.localise(wrapped(model))
    optimizer.add_param_group({"params": model.body.parameters(), "lr": 0.5})
    assert optimizer.param_groups[1]["params"] == list(share.local_parameters())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert [group["params"] for group in optimizer.local_state_dict()["param_groups"]] == [[0], [1, 2, 3, 4], [5]]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": model.body.parameters()})


def test_freezing_and_unfreezing_mid_run_is_exact() -> None:
    pair = Pair(adamw, "body")
    for frozen in (False, True, True, False):
        for model in (pair.whole, *pair.models):
            model.body.requires_grad_(not frozen)
        pair.whole_optimizer.zero_grad()
        pair.whole(torch.arange(6)).square().mean().backward()
        for model in pair.models:
            for name, parameter in model.named_parameters():
                if type(parameter) is nn.Parameter:
                    gradient = dict(pair.whole.named_parameters())[name].grad
                    parameter.grad = None if gradient is None else gradient.clone()
        for optimizer in (pair.whole_optimizer, *pair.optimizers):
            optimizer.step()
    pair.check()


def test_what_is_not_built_is_refused() -> None:
    optimizer = sgd(Model())
    for keys in ({"static_loss_scale": 2.0}, {"dynamic_loss_scale": True}, {"dynamic_loss_args": {"min_scale": 1}}):
        with pytest.raises(ConfigError, match=rf"{next(iter(keys))}.*fp16"):
            DistributedOptimizer(optimizer, **keys)
    assert type(optimizer) is torch.optim.SGD
    DistributedOptimizer(optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, dynamic_loss_args=None)
    with pytest.raises(ConfigError, match="given Linear"):
        DistributedOptimizer(nn.Linear(1, 1))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, float("inf"), 0.0])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_clipping_over_two_ranks_is_clipping_in_one_process(norm_type: float, foreach: bool | None) -> None:
    pair = Pair(sgd, "body")
    pair.backward()
    parts = [
        gradient_norms([p.grad for p in model.parameters() if p.grad is not None], norm_type) for model in pair.models
    ]
    expected = torch.nn.utils.clip_grad_norm_(pair.whole.parameters(), 1e-3, norm_type, foreach=foreach)
    for model in pair.models:
        with gathering(clip, lambda value: parts):
            total = clip_grad_norm_(model, 1e-3, norm_type, foreach=foreach)
        torch.testing.assert_close(total, expected)
    for model in pair.models:
        for name, parameter in model.named_parameters():
            if type(parameter) is nn.Parameter:
                torch.testing.assert_close(parameter.grad, dict(pair.whole.named_parameters())[name].grad)


def test_clipping_counts_sparse_gradients_and_a_tied_parameter_once() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    line = nn.Linear(3, 1)
    line(table(torch.tensor([1, 1, 2]))).sum().backward()
    dense = [table.weight.grad.to_dense(), line.weight.grad, line.bias.grad]
    expected = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in dense]))
    parameters = [table.weight, line.weight, line.bias, table.weight]
    total = clip_grad_norm_(parameters, expected.item() / 2)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(table.weight.grad.to_dense(), dense[0] / 2)


def test_a_stage_without_gradients_gets_the_norm_of_the_others() -> None:
    other = gradient_norms([torch.full((4,), 2.0)])
    with gathering(clip, lambda mine: [mine, other]):
        assert clip_grad_norm_([], 1.0) == 4.0
    assert clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0) == 0.0


def test_a_norm_that_is_not_finite_is_an_error_on_every_rank_if_asked() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    bad = torch.tensor([float("nan")])
    with gathering(clip, lambda mine: [mine, bad]):
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
        assert clip_grad_norm_(parameter, 1.0).isnan()


def test_merging_keeps_the_first_of_equal_parts() -> None:
    optimizer = DistributedOptimizer(sgd(Model()))
    part = optimizer.local_state_dict()
    assert merged([part, part]) == torch.optim.SGD(groups_of(Model()), lr=0.1, momentum=0.9).state_dict()
