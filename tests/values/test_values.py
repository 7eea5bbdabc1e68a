"""Python values come back from their tree as what they were."""

from __future__ import annotations

import math
import sys
import types
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright import _core
from shardwright.errors import ConfigError, UnsupportedValueError
from shardwright.values import ValueRegistry, register_type, registry
from transformers.modeling_outputs import BaseModelOutputWithPast

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Pair:
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    value: int


class Bag(dict):  # type: ignore[type-arg]
    pass


class Opaque:
    def __init__(self, content: int) -> None:
        self.content = content


def around(value: Any) -> Any:
    spec, tensors = _core.flatten(value, registry)
    return spec.build(tensors, registry)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.just(...)
)
hashable = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(hashable, inner)
        | st.dictionaries(hashable, inner).map(OrderedDict)
        | st.sets(hashable)
        | st.frozensets(hashable)
        | st.builds(Point, inner, inner)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


@given(trees)
@settings(deadline=None)
def test_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    assert same(value, around(value))


def test_nan_and_large_integers_come_back() -> None:
    assert math.isnan(around(math.nan))
    assert around(-(7**9000)) == -(7**9000)


@pytest.mark.parametrize(
    "value",
    [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), torch.strided, torch.channels_last, torch.float8_e5m2],
)
def test_constants_of_torch_come_back(value: Any) -> None:
    assert type(around(value)) is type(value)
    assert around(value) == value


def test_a_tensor_named_twice_stays_one_tensor() -> None:
    tensor, other = torch.ones(2), torch.ones(2)
    spec, tensors = _core.flatten({"a": tensor, "b": [tensor, other]}, registry)
    assert [id(t) for t in tensors] == [id(tensor), id(other)]
    built = spec.build(tensors, registry)
    assert built["a"] is built["b"][0] is tensor
    assert built["b"][1] is other


def test_a_parameter_is_a_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    _, tensors = _core.flatten([parameter], registry)
    assert tensors[0] is parameter


def test_outputs_of_transformers_come_back_as_their_class() -> None:
    output = BaseModelOutputWithPast(
        last_hidden_state=torch.ones(1), past_key_values=None, hidden_states=(torch.ones(2),)
    )
    built = around(output)
    assert type(built) is BaseModelOutputWithPast
    assert list(built) == list(output)
    assert built.last_hidden_state is output.last_hidden_state
    assert built.past_key_values is None


def test_registered_types_come_back() -> None:
    register_type(Pair)
    register_type(Frozen)
    register_type(Bag)
    register_type(Opaque, name="opaque", flatten=lambda value: value.content, unflatten=Opaque)
    value = Pair(Frozen(3), Bag(a=Pair(1, None)))
    built = around(value)
    assert built == value
    assert type(built.right) is Bag
    assert around(Opaque(5)).content == 5


def test_a_type_is_registered_with_both_functions_or_none() -> None:
    with pytest.raises(ConfigError, match="both flatten and unflatten"):
        register_type(Opaque, flatten=lambda value: value.content)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (lambda bad: ((1, {"mask": [None, bad]}), {}), "args[1]['mask'][1]"),
        (lambda bad: ((), {"bias": (bad,)}), "kwargs['bias'][0]"),
        (lambda bad: (bad,), "args"),
    ],
)
def test_an_unknown_type_is_named_with_its_place(value: Any, place: str) -> None:
    class Unknown:
        pass

    with pytest.raises(UnsupportedValueError) as raised:
        _core.flatten(value(Unknown()), registry, ("args", "kwargs"))
    assert f"stands at {place}," in str(raised.value)
    assert "Unknown" in str(raised.value)
    assert "smp.register_type" in str(raised.value)


def test_a_value_within_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(UnsupportedValueError, match="a value of type list nested more than 64 deep stands at "):
        _core.flatten(circle, registry)


def test_an_unknown_type_that_is_the_whole_value_is_named_without_a_place() -> None:
    with pytest.raises(UnsupportedValueError, match=r"^a value of type function cannot cross ranks; pass tensors, "):
        _core.flatten(lambda: None, registry)


def test_a_name_that_is_not_registered_builds_nothing() -> None:
    sender = ValueRegistry()
    sender.add(Opaque, "os:system", lambda value: value.content, Opaque)
    spec, tensors = _core.flatten(Opaque(1), sender)
    with pytest.raises(UnsupportedValueError, match="'os:system'"):
        spec.build(tensors, registry)


@dataclass
class WithState:
    value: int

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("run by what a message says")


@dataclass(eq=False)
class Layer(torch.nn.Module):
    width: int


class Watched:
    @property
    def value(self) -> int:
        return 0

    @value.setter
    def value(self, value: int) -> None:
        raise AssertionError("run by what a message says")


@dataclass
class Shadowed(Watched):
    other: int = 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: WithState(1), "WithState"),
        (lambda: Layer.__new__(Layer), "Layer"),
        (lambda: numpy.array([object()]), "elements are more than bytes"),
        (lambda: numpy.ma.masked_array([1.0]), "MaskedArray"),
        (lambda: numpy.matrix([1.0]), "matrix"),
    ],
)
def test_a_value_that_is_more_than_its_parts_is_refused(make: Any, text: str) -> None:
    with pytest.raises(UnsupportedValueError, match=text):
        around([make()])


def test_building_a_dataclass_runs_nothing_of_its_class() -> None:
    value = Shadowed()
    vars(value)["value"] = 3
    assert vars(around(value)) == {"other": 0, "value": 3}


def test_a_name_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy_module")

    def load(name: str) -> Any:
        raise AssertionError("run by what a message says")

    lazy.__getattr__ = load  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    for name in (
        "lazy_module:Thing",
        "email.mime.audio:MIMEAudio",
        "numpy:ndarray.flat.x",
        "builtins:eval",
        "os:system",
    ):
        assert name.partition(":")[0] != "email.mime.audio" or name.partition(":")[0] not in sys.modules
        with pytest.raises(UnsupportedValueError, match="which this rank has not registered"):
            registry.decoders[name]
    assert "email.mime.audio" not in sys.modules


@pytest.mark.parametrize(
    "array",
    [
        numpy.zeros((0, 3)),
        numpy.array(2.5),
        numpy.arange(6).reshape(2, 3)[:, ::2],
        numpy.arange(3, dtype=">i4"),
        numpy.array(["2020-01-01"], "datetime64[D]"),
        numpy.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        numpy.ones((2, 3), numpy.complex64).T,
    ],
    ids=str,
)
def test_arrays_come_back_as_they_were(array: Any) -> None:
    back = around(array)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert back.flags.writeable
    array.flags.writeable = False
    assert not around(array).flags.writeable


def test_an_array_that_was_sent_is_that_of_the_moment() -> None:
    array = numpy.zeros(3)
    spec, tensors = _core.flatten(array, registry)
    array.fill(1)
    assert spec.build(tensors, registry).tolist() == [0, 0, 0]
