"""The codec of user content: every value that it takes comes back as it was, and others are named."""

from __future__ import annotations

import datetime
import enum
import json
import math
import pathlib
import struct
import types
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.checkpoints.decoding import Decoder
from shardwright.checkpoints.encoding import Encoder
from shardwright.errors import UnsupportedValueError
from torch import nn

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(width=64)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
)
ZONES = st.none() | st.integers(-1439, 1439).map(lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes)))
WELL_KNOWN = (
    st.lists(st.integers(0, 9)).map(torch.Size)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cuda", 1), torch.device("cpu"), torch.strided])
    | st.sampled_from(
        [torch.channels_last, ..., np.float16(0.1), np.bool_(True), np.int64(3), np.dtype("<f4"), 1 << 80]
    )
    | st.sampled_from([np.dtype([("a", "<i4"), ("b", "<f8", (2,))]), uuid.UUID(int=7), range(3, 9, 2), slice(1, None)])
    | st.binary().map(bytearray)
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.timedeltas()
    | st.dates()
    | st.datetimes(timezones=ZONES)
    | st.times()
    | st.text(st.characters(exclude_characters="\0")).map(PurePosixPath)
    | st.text(st.characters(exclude_characters="\0")).map(PureWindowsPath)
    | st.text(st.characters(exclude_characters="\0")).map(pathlib.Path)
)
KEYS = st.integers() | st.text() | st.booleans() | st.tuples(st.integers(), st.text())
NAMES = st.from_regex("[a-z]{1,5}", fullmatch=True)


def of_objects(items: list[Any]) -> Any:
    """An array of NumPy with any objects."""
    whole = np.empty(4, object)
    for index, item in enumerate(items):
        whole[index] = item
    return whole.reshape(2, 2)


VALUES = st.recursive(
    SCALARS | WELL_KNOWN,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.lists(st.tuples(st.text(), inner)).map(OrderedDict)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
        | st.dictionaries(NAMES, inner).map(lambda items: Namespace(**items))
        | st.dictionaries(NAMES, inner).map(lambda items: types.SimpleNamespace(**items))
        | st.dictionaries(KEYS, inner).map(lambda items: defaultdict(list, items))
        | st.dictionaries(KEYS, inner).map(lambda items: defaultdict(None, items))
        | st.dictionaries(KEYS, st.integers()).map(Counter)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 3))
        | st.lists(inner, min_size=4, max_size=4).map(of_objects)
    ),
    max_leaves=20,
)


def through(value: Any, encoder: Encoder | None = None) -> Any:
    """The value once it was JSON."""
    encoder = encoder or Encoder("user/")
    text = json.dumps(encoder.encode(value, "value"), allow_nan=False)
    text.encode()
    return Decoder(encoder.tensors).decode(json.loads(text))


def same(one: Any, other: Any) -> bool:
    """Equal in value, type and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    if isinstance(one, Namespace | types.SimpleNamespace):
        return same(vars(one), vars(other))
    if isinstance(one, deque):
        return one.maxlen == other.maxlen and same(list(one), list(other))
    if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and same(one.tolist(), other.tolist())
    if isinstance(one, datetime.datetime | datetime.time):
        return (one, one.fold, one.tzinfo) == (other, other.fold, other.tzinfo)
    return bool(one == other)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_every_value_comes_back(value: Any) -> None:
    assert same(value, through(value))


@pytest.mark.parametrize("bits", [63, 2047, 2048, 2049, 20_000])
def test_long_integers_come_back(bits: int) -> None:
    values = [sign * (2**bits + by) for sign in (-1, 1) for by in (-1, 0, 1)]
    assert through(values) == values


@pytest.mark.parametrize("bits", ["7ff8000000000000", "fff8000000000001", "7ff0000000000001", "fff0000000000000"])
def test_floats_that_are_no_numbers_keep_their_bits(bits: str) -> None:
    value = struct.unpack(">d", bytes.fromhex(bits))[0]
    assert struct.pack(">d", through(value)) == struct.pack(">d", value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i2").reshape(2, 3).T,
        np.array([], dtype=np.float32),
        np.array(["a", "bcd"]),
        np.array([b"a"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array(1.5),
        np.float16(0.1),
        np.bool_(True),
        np.datetime64("2020-01-01"),
        np.str_("abc"),
        np.complex128(1 + 2j),
        np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
        np.ma.array([1, 2], mask=[True, False], fill_value=7),
    ],
    ids=lambda array: f"{type(array).__name__}-{array.dtype.str}",
)
def test_arrays_and_scalars_of_numpy_come_back(array: Any) -> None:
    found = through([array])[0]
    assert type(found) is type(array)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert np.array_equal(found, array)
    if isinstance(array, np.ndarray):
        found.flat[:1] = found.flat[:1]  # it can be written to


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.complex128, torch.int64])
def test_tensors_come_back(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 2).mT.to(dtype)
    other = nn.Parameter(torch.randn(2).to(dtype), requires_grad=False)
    found = through({"a": tensor, "b": [tensor, other], "conjugate": tensor.conj() if dtype.is_complex else tensor})
    assert found["a"] is found["b"][0]
    assert found["a"].dtype == dtype
    assert torch.equal(found["a"], tensor)
    assert torch.equal(found["conjugate"], tensor.conj() if dtype.is_complex else tensor)
    assert type(found["b"][1]) is nn.Parameter
    assert torch.equal(found["b"][1], other)
    assert not found["b"][1].requires_grad


def test_tensors_of_a_set_have_names_of_their_own() -> None:
    found = through({torch.zeros(()), torch.ones(())})
    assert sorted(map(float, found)) == [0.0, 1.0]


class Color(enum.IntEnum):
    RED = 1


class Name(str):
    pass


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Color.RED, r"value\['a'\]\[1\].b is a tests.checkpoint.test_codec.Color.*convert it, int"),
        (Name("x"), r"value\['a'\]\[1\].b is a .*Name.*convert it, str"),
        (Point(1, 2), r"value\['a'\]\[1\].b is a .*Point.*convert it, tuple"),
        (nn.Linear(1, 1), r"value\['a'\]\[1\].b is a torch.nn.modules.linear.Linear.*save its state_dict"),
        (math.sqrt, r"value\['a'\]\[1\].b is a builtin_function_or_method"),
        (np.array([object()]), r"value\['a'\]\[1\].b\[0\] is an object, which cannot be saved"),
        (np.array([[1]]).view(np.matrix), r"value\['a'\]\[1\].b is a numpy.matrix.*convert it, numpy.asarray"),
        (
            torch.nested.nested_tensor([torch.ones(1)], layout=torch.strided),
            r"value\['a'\]\[1\].b is a Tensor .*only dense tensors",
        ),
        (torch.eye(2).to_sparse(), r"value\['a'\]\[1\].b is a Tensor .*sparse"),
        (torch.empty(2, device="meta"), r"value\['a'\]\[1\].b is a Tensor .*meta"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_saved_is_named_by_its_path(value: Any, why: str) -> None:
    with pytest.raises(UnsupportedValueError, match=why):
        through({"a": [0, Namespace(b=value)]})


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        through(value)


def test_a_key_that_cannot_be_saved_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match=r"the key .* of value\['a'\]"):
        through({"a": {Color.RED: 1}})


@pytest.mark.parametrize(
    "content", [{"eval": "1"}, {"decode": []}, {"tensor": "x"}, {"dtype": "load"}, {"a": 1, "b": 2}, 0.5]
)
def test_what_no_encoder_writes_is_refused(content: Any) -> None:
    with pytest.raises(UnsupportedValueError):
        Decoder({}).decode(content)
