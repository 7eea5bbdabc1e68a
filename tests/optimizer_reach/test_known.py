"""What is known of optimizers without a trial, what they declare, and what they read of parameters."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.half_precision import Masters
from shardwright.optimizer.reach import drawing_nothing, question
from shardwright.optimizer.reach.known import Reach, declares_elements, known_reach
from shardwright.optimizer.reach.probe import Found
from shardwright.optimizer.sharding.elementwise import is_elementwise
from torch import nn

from .changes import attribute, first_state, list_option, named_state, number_of_parameters, optimizer_with, option
from .optimizers import Declared


class Arguments(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)

    def learning_rate(self) -> float:
        return float(self.param_groups[0]["lr"])


class OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnState(torch.optim.SGD):
    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


class OwnGroups(torch.optim.SGD):
    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.__dict__["groups"]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.__dict__["groups"] = groups


class Mixin:
    def step(self, closure: Any = None) -> Any:
        return None


class Mixed(Mixin, torch.optim.SGD):  # type: ignore[misc]
    pass


class Attributes(torch.optim.SGD):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Passing(torch.optim.SGD):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, lr=0.1, **kwargs)
        self.held = torch.ones(1)  # so that a trial constructs another one

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class DeclaredAgain(Declared):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 3))


@pytest.mark.parametrize("kind", [OwnStep, OwnState, OwnGroups, Mixed, Attributes])
def test_a_subclass_that_overrides_the_rule_is_not_known(kind: type[torch.optim.Optimizer]) -> None:
    assert known_reach(kind) is None
    kind([parameter()])  # PyTorch puts a step with hooks into the class
    assert known_reach(kind) is None


def test_a_subclass_that_chooses_arguments_is_known() -> None:
    for _ in range(2):
        assert known_reach(Arguments) is Reach.ELEMENT
        Arguments([parameter()])
    assert not is_elementwise(Arguments), "shares hold whole parameters of subclasses"


@pytest.mark.parametrize("wraps", [False, True])
def test_a_class_whose_step_was_replaced_is_not_known(monkeypatch: pytest.MonkeyPatch, wraps: bool) -> None:
    torch.optim.Adagrad([parameter()])
    known = torch.optim.Adagrad.step

    def step(self: Any, closure: Any = None) -> Any:
        return known(self, closure)

    monkeypatch.setattr(torch.optim.Adagrad, "step", functools.wraps(known)(step) if wraps else step)
    assert known_reach(torch.optim.Adagrad) is None
    monkeypatch.undo()
    assert known_reach(torch.optim.Adagrad) is Reach.ELEMENT


def test_a_declaration_is_of_the_class_that_has_the_step() -> None:
    made, again = Declared([parameter()]), DeclaredAgain([parameter()])
    assert declares_elements(made, Declared)
    assert not declares_elements(again, DeclaredAgain)
    again.updates_elements_independently = True
    assert declares_elements(again, DeclaredAgain)


def test_a_constructor_that_passes_its_arguments_on_is_tried() -> None:
    assert question.found_of(Passing([parameter()]), Passing) == Found(Reach.ELEMENT)


def test_what_a_step_leaves_that_depends_on_other_parameters_is_found() -> None:
    for change in (first_state, number_of_parameters):
        made = optimizer_with(change, "step", [parameter()])
        found = question.found_of(made, type(made))
        assert found.reach is Reach.MODEL
        assert found.reason in ("optimizer.state of each parameter", "the attribute 'count'")
    for change in (attribute, named_state, option, list_option):
        made = optimizer_with(change, "step", [parameter()])
        assert question.found_of(made, type(made)).reach is Reach.ELEMENT


def test_a_trial_is_made_again_where_something_may_be_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[int] = []

    def counted(*given: Any) -> Found:
        trials.append(1)
        return Found(Reach.ELEMENT)

    monkeypatch.setattr(question, "probe", counted)
    optimizer = OwnStep([parameter()], weight_decay=0.0)

    def asked() -> int:
        question.found_of(optimizer, OwnStep)
        return len(trials)

    assert [asked(), asked()] == [1, 1]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.5
    assert asked() == 1, "neither a load nor another rate switches anything on"
    optimizer.param_groups[0]["weight_decay"] = 0.1
    assert asked() == 2
    optimizer.uses_norms = True  # type: ignore[attr-defined]
    assert asked() == 3
    optimizer.uses_norms = False  # type: ignore[attr-defined]
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert [asked(), asked()] == [4, 4]


def test_master_weights_have_the_attributes_of_their_parameters() -> None:
    masters, one = Masters(), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    one.matters = 1  # type: ignore[attr-defined]
    assert masters.of(one).matters == 1  # type: ignore[attr-defined]
    del one.matters  # type: ignore[attr-defined]
    one._later = 2  # type: ignore[attr-defined]
    master: Any = masters.of(one)
    assert master._later == 2
    assert not hasattr(master, "matters")


def test_numbers_drawn_in_an_update_of_parts_are_refused() -> None:
    optimizer = torch.optim.SGD([parameter()])
    with drawing_nothing(optimizer):
        torch.rand(3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(smp.ConfigError, match="SGD drew random numbers"), drawing_nothing(optimizer):
        torch.rand(3)
