"""Classes of the script's own cross ranks once they are registered, by their state or by given functions."""

from __future__ import annotations

import pathlib
from abc import ABC, abstractmethod
from collections import OrderedDict, UserDict, deque
from dataclasses import InitVar, dataclass, field
from enum import Enum, Flag
from typing import Any

import pytest
import torch
from shardwright import _core
from shardwright.errors import ConfigError, UnsupportedValueError
from shardwright.partition.observe import tensors_in
from shardwright.step.output import map_tensors, merge_microbatches
from shardwright.values import register_type, registry
from torch import nn


class Plain:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left: Any) -> None:
        self.left = left


class Both(Slotted):
    def __init__(self, left: Any) -> None:
        super().__init__(left)
        self.more = 1


@dataclass
class Derived:
    factor: InitVar[int]
    value: int = field(init=False)

    def __post_init__(self, factor: int) -> None:
        self.value = 2 * factor


class Shade(Enum):
    LIGHT = 1
    DARK = 2


class Rights(Flag):
    READ = 1
    WRITE = 2


class Labelled(dict):  # type: ignore[type-arg]
    pass


class Checked(OrderedDict):  # type: ignore[type-arg]
    """Its own way to be made and filled is passed by."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for number in range(size):
            OrderedDict.__setitem__(self, number, None)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("fixed")


class Stateful(dict):  # type: ignore[type-arg]
    def __getstate__(self) -> Any:
        return None


for kind in (Plain, Slotted, Both, Derived, Shade, Rights, UserDict):
    register_type(kind)


def around(value: Any) -> Any:
    spec, tensors = _core.flatten(value, registry)
    return spec.build(tensors, registry)


def test_objects_come_back_with_their_attributes_and_without_init() -> None:
    tensor = torch.ones(1)
    plain = around(Plain([tensor, Plain(None)]))
    assert plain.tensor[0] is tensor
    assert type(plain.tensor[1]) is Plain
    slotted = around(Slotted(1))
    assert slotted.left == 1
    assert not hasattr(slotted, "right")
    both = around(Both(2))
    assert (both.left, both.more) == (2, 1)
    assert around(Derived(3)).value == 6
    assert around(UserDict(a=1)) == {"a": 1}


def test_members_of_an_enum_come_back_as_themselves() -> None:
    assert around(list(Shade)) == list(Shade)
    assert around(Shade.DARK) is Shade.DARK
    assert around(Rights.READ | Rights.WRITE) is Rights.READ | Rights.WRITE


def test_dictionaries_come_back_as_their_class_without_registration() -> None:
    labelled = Labelled(a=1)
    labelled.label = "x"  # type: ignore[attr-defined]
    back = around(labelled)
    assert (type(back), back, vars(back)) == (Labelled, {"a": 1}, {"label": "x"})
    checked = around(Checked(3))
    assert (type(checked), list(checked)) == (Checked, [0, 1, 2])


def test_a_dictionary_with_a_state_of_its_own_is_registered() -> None:
    with pytest.raises(UnsupportedValueError, match="Stateful"):
        around(Stateful(a=1))


def test_a_class_that_no_other_rank_would_find_is_registered() -> None:
    class Local(dict):  # type: ignore[type-arg]
        pass

    with pytest.raises(UnsupportedValueError, match="Local"):
        around(Local())
    register_type(Local)
    assert type(around(Local())) is Local


def test_a_name_belongs_to_one_class_and_a_class_has_one_name() -> None:
    @register_type
    class First:
        pass

    register_type(First)
    with pytest.raises(ConfigError, match="is registered as"):
        register_type(First, name="another")

    class Second:
        pass

    name = registry.encoders[First][0]
    with pytest.raises(ConfigError, match=r"First has that name; give another one"):
        register_type(Second, name=name)


def test_a_class_that_is_defined_anew_takes_its_name_over() -> None:
    def define() -> type:
        class Anew:
            pass

        return register_type(Anew)

    first, second = define(), define()
    assert type(around(second())) is second
    with pytest.raises(UnsupportedValueError, match="Anew"):
        around(first())


class Abstract(ABC):
    @abstractmethod
    def method(self) -> None:
        """Nothing."""


class Queue(deque):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Queue, "it is a deque"),
        (Abstract, "abstract"),
        (int, "cross ranks as they are"),
        (torch.Size, "cross ranks as they are"),
        (nn.Parameter, "cross ranks as they are"),
        (nn.Linear, "state_dict"),
    ],
)
def test_a_class_that_cannot_be_taken_apart_is_refused(kind: type, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        register_type(kind)


def test_functions_make_any_class_cross() -> None:
    register_type(Queue, name="queue", flatten=list, unflatten=Queue)
    assert around(Queue([1, 2])) == Queue([1, 2])
    register_type(pathlib.PosixPath, name="path", flatten=str, unflatten=pathlib.PosixPath)
    assert around([pathlib.Path("/a/b")]) == [pathlib.PosixPath("/a/b")]


def test_an_attribute_that_cannot_cross_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match=r"stands at \[0\]<.*:Plain>\['tensor'\],"):
        around([Plain(lambda: None)])


def test_the_trace_sees_the_tensors_of_registered_objects() -> None:
    one, two, three = torch.ones(1), torch.ones(1), torch.ones(1)
    assert {id(tensor) for tensor in tensors_in([Plain([one, Slotted(two)]), Labelled(a=three)])} == {
        id(one),
        id(two),
        id(three),
    }


def test_results_of_steps_keep_their_classes_and_lose_their_history() -> None:
    tensor = torch.ones(1, requires_grad=True) * 2
    labelled = Labelled(loss=tensor)
    labelled.label = "x"  # type: ignore[attr-defined]
    detached = map_tensors([Plain(tensor), labelled, Derived(1)], torch.Tensor.detach, in_registered=True)
    assert not detached[0].tensor.requires_grad
    assert (type(detached[1]), detached[1].label) == (Labelled, "x")
    assert not detached[1]["loss"].requires_grad
    assert detached[2].value == 2
    merged = merge_microbatches([detached, detached])
    assert merged[0] is detached[0]
    assert type(merged[1]) is Labelled
    assert merged[2].value == 2
