"""What scripts put into files: data of classes of their own come back as plain data, the rest is left out and named."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import enum
import json
import logging
import threading
from collections import OrderedDict, defaultdict
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import shardwright as smp
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.checkpoints.decoding import Decoder
from shardwright.checkpoints.encoding import Encoder
from shardwright.errors import UnsupportedValueError
from torch import nn
from torch.utils.data import DataLoader

from tests.checkpoint.test_codec import SCALARS, WELL_KNOWN, same


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Mode(enum.Flag):
    A = 1
    B = 2


class Name(str):
    """Says something else than it is."""

    __slots__ = ()

    def __str__(self) -> str:
        return "other"


class Rate(float):
    pass


class Items(list[Any]):
    def __iter__(self) -> Any:
        raise NotImplementedError


class Easy(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Args(argparse.Namespace):
    pass


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: Any
    more: Any = None


class Point(NamedTuple):
    x: Any
    y: Any


class Config:
    """A configuration as libraries have them."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items = items

    def to_dict(self) -> dict[str, Any]:
        return self.items


class Table(Config):
    """All that it holds is no configuration."""

    def __len__(self) -> int:
        return 1


class Broken:
    def to_dict(self) -> Any:
        raise KeyError("broken")


class Marked(torch.Tensor):
    pass


def same_named_tuple(one: Any, other: Any) -> bool:
    """Of the same name and fields."""
    return isinstance(other, tuple) and (type(one).__name__, one._fields) == (type(other).__name__, other._fields)  # type: ignore[attr-defined]


#: A value, and what comes back of it.
Pair = tuple[Any, Any]
LEFT_OUT = "left out"


def not_data() -> st.SearchStrategy[Pair]:
    made = (
        lambda: nn.Linear(1, 1),
        lambda: lambda: None,
        lambda: threading.Lock(),
        lambda: DataLoader([1, 2]),
        lambda: iter([1]),
        lambda: torch.Generator(),
        lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))]),
        lambda: object(),
        lambda: nn.Linear,
        lambda: np,
        lambda: memoryview(b"x"),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.eye(2).to_sparse(),
        lambda: Table({"a": 1}),
        lambda: Broken(),
    )
    return st.sampled_from(made).map(lambda make: (make(), LEFT_OUT))


def simple() -> st.SearchStrategy[Pair]:
    own = (
        (Color.RED, "red"),
        (Level.HIGH, 3),
        (Mode.A | Mode.B, 3),
        (Name("x"), "x"),
        (Rate(0.5), 0.5),
        (Items([1]), [1]),
        (MappingProxyType({"a": 1}), {"a": 1}),
        ({"a": 1}.keys(), {"a"}),
    )
    return (SCALARS | WELL_KNOWN).map(lambda value: (value, value)) | st.sampled_from(own) | not_data()


def around(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    lists = st.lists(inner, max_size=4)
    dicts = st.dictionaries(st.from_regex("[a-z]{1,3}", fullmatch=True), inner, max_size=4)

    def both(kind: Any, also: Any) -> Any:
        def make(items: dict[str, Pair]) -> Pair:
            return kind({key: one for key, (one, _) in items.items()}), also(
                {key: two for key, (_, two) in items.items()}
            )

        return make

    def listed(kind: Any, also: Any) -> Any:
        return lambda items: (kind([one for one, _ in items]), also([two for _, two in items]))

    def namespace(items: dict[str, Any]) -> argparse.Namespace:
        return argparse.Namespace(**items)

    return (
        lists.map(listed(list, list))
        | lists.map(listed(tuple, tuple))
        | lists.map(listed(collections.deque, collections.deque))
        | lists.map(listed(Items, list))
        | dicts.map(both(dict, dict))
        | dicts.map(both(OrderedDict, OrderedDict))
        | dicts.map(both(Easy, dict))
        | dicts.map(both(MappingProxyType, dict))
        | dicts.map(both(Config, dict))
        | dicts.map(both(lambda items: Args(**items), namespace))
        | dicts.map(both(namespace, namespace))
        | dicts.map(both(lambda items: SimpleNamespace(**items), lambda items: SimpleNamespace(**items)))
        | dicts.map(both(lambda items: defaultdict(lambda: 0, items), dict))
        | st.tuples(inner, inner).map(
            lambda pairs: (Settings(pairs[0][0], pairs[1][0]), {"rate": pairs[0][1], "more": pairs[1][1]})
        )
        | st.tuples(inner, inner).map(lambda pairs: (Point(pairs[0][0], pairs[1][0]), Point(pairs[0][1], pairs[1][1])))
    )


PAIRS = st.recursive(simple(), around, max_leaves=15)


def saved(value: Any) -> tuple[Any, Encoder]:
    """The value once it was JSON, and what was told."""
    encoder = Encoder(leave_out=True)
    text = json.dumps(encoder.encode(value, "value"), allow_nan=False)
    return Decoder(encoder.tensors).decode(json.loads(text)), encoder


def comes_back(found: Any, wanted: Any) -> bool:
    """Whether all of it is there, and what was left out says so wherever it is asked for."""
    if wanted is LEFT_OUT:
        with pytest.raises(smp.LeftOutError, match="is not data and was left out"):
            bool(found)
        return True
    if isinstance(wanted, dict):
        assert isinstance(found, OrderedDict) == isinstance(wanted, OrderedDict)
        for key, one in wanted.items():
            if one is LEFT_OUT:
                assert key not in found
                with pytest.raises((smp.LeftOutError, KeyError), match="left out") as caught:
                    found[key]
                assert isinstance(caught.value, smp.LeftOutError)
                assert isinstance(caught.value, KeyError)
        there = {key: one for key, one in wanted.items() if one is not LEFT_OUT}
        return list(found) == list(there) and all(comes_back(found[key], one) for key, one in there.items())
    if isinstance(wanted, argparse.Namespace | SimpleNamespace):
        assert isinstance(found, argparse.Namespace) == isinstance(wanted, argparse.Namespace)
        for key, one in vars(wanted).items():
            if one is LEFT_OUT:
                assert not hasattr(found, key)
                with pytest.raises(smp.LeftOutError, match="left out"):
                    getattr(found, key)
        there = {key: one for key, one in vars(wanted).items() if one is not LEFT_OUT}
        return list(vars(found)) == list(there) and all(
            comes_back(getattr(found, key), one) for key, one in there.items()
        )
    if isinstance(wanted, Point):
        assert same_named_tuple(wanted, found)
        return comes_back(found.x, wanted.x) and comes_back(found.y, wanted.y)
    if isinstance(wanted, list | tuple | collections.deque):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(comes_back, found, wanted))
    return same(found, wanted)


@settings(max_examples=100, deadline=None)
@given(PAIRS)
def test_data_of_any_class_comes_back_and_the_rest_is_named(pair: Pair) -> None:
    value, wanted = pair
    found, _ = saved(value)
    assert comes_back(found, wanted)
    again, _ = saved(found)  # a script saves what it was given back
    assert comes_back(again, wanted)
    assert comes_back(copy.deepcopy(found), wanted)


def test_a_configuration_of_transformers_comes_back_as_its_dict() -> None:
    config = transformers.GPT2Config(n_layer=3)
    found, told = saved({"model_config": config})
    assert found == {"model_config": config.to_dict()}
    assert transformers.GPT2Config.from_dict(found["model_config"]).to_dict() == config.to_dict()
    assert told.plain == [
        [
            "value['model_config']",
            "a transformers.models.gpt2.configuration_gpt2.GPT2Config",
            "the dict of its to_dict()",
        ]
    ]


def test_keys_and_items_of_sets_stay_apart_or_are_named() -> None:
    found, told = saved({Level.HIGH: 1, Settings(1): 2, Point(1, 2): 3, nn.Linear: 4, "x": 5, 1.5: 6})
    assert found == {3: 1, (1, 2): 3, "x": 5, 1.5: 6}
    assert len(told.left_out) == 2
    found, told = saved({Color.RED: 1, "red": 2})
    assert found == {"red": 2}
    assert "the same as another key" in str(told.left_out[0])
    found, told = saved({Color.RED, "x", Settings(1)})
    assert found == {"red", "x"}
    assert "is no key" in str(told.left_out[0])


def test_what_contains_itself_is_left_out_where_it_does() -> None:
    value: Any = {"a": 1}
    value["self"] = [value, value]
    found, told = saved(value)
    assert found["a"] == 1
    assert [str(each).split(",")[0] for each in told.left_out] == [
        "value['self'][0] is a dict that contains itself",
        "value['self'][1] is a dict that contains itself",
    ]
    deep: Any = 1
    for _ in range(5000):
        deep = Config({"deep": deep})
    found, told = saved({"deep": deep, "b": 2})
    assert found["b"] == 2
    assert "nested too deep" in str(told.left_out[0])


def test_a_tensor_of_another_class_comes_back_as_a_tensor() -> None:
    found, _ = saved({"a": torch.ones(2).as_subclass(Marked), "m": np.matrix([[1]])})
    assert type(found["a"]) is torch.Tensor
    assert type(found["m"]) is np.ndarray


def test_a_value_of_many_left_out_parts_says_so_in_one_line(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    value = {"loaders": [DataLoader([1]) for _ in range(30)], "step": 3, "config": Config({"a": 1})}
    smp.init({})
    try:
        with caplog.at_level(logging.WARNING, logger="shardwright"):
            for name in ("one", "two"):
                smp.save(value, str(tmp_path / name))
            found = smp.load(str(tmp_path / "two"))
    finally:
        smp.shutdown()
    said = [record.getMessage() for record in caplog.records if "smp.save" in record.getMessage()]
    assert len(said) == 2  # what is left out, and what is plain data, once
    assert "value['loaders'][0] (a torch.utils.data.dataloader.DataLoader)" in said[0]
    assert said[0].count("DataLoader") == 10
    assert "and 20 more" in said[0]
    assert "value['config'] (a tests.checkpoint.test_left_out.Config) as the dict of its to_dict()" in said[1]
    assert found["step"] == 3
    with pytest.raises(smp.LeftOutError, match=r"value\['loaders'\]\[3\] is not there"):
        next(iter(found["loaders"][3]))


def test_a_file_of_nothing_but_what_is_no_data_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedValueError, match=r"value is a torch.nn.modules.linear.Linear.*save its state_dict\(\)"
    ):
        smp.save(nn.Linear(1, 1), str(tmp_path / "model"), partial=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("partial", [True, False])
def test_a_checkpoint_is_saved_whatever_lies_beside_the_model(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, partial: bool
) -> None:
    """What the examples of the original put there, and what nobody would."""
    config = transformers.GPT2Config(n_layer=1)
    content = {
        "cli_args": argparse.Namespace(lr=1e-3, dtype=torch.bfloat16, loader=DataLoader([1])).__dict__,
        "args": argparse.Namespace(lr=1e-3, file=open(__file__)),  # noqa: SIM115
        "model_config": config,
        "shapes": {"weight": torch.Size([3, 4])},
        "buffer_names": ["a", "b"],
        "schedule": lambda step: step,
        "total_steps": 3,
    }
    smp.init({})
    try:
        model = smp.DistributedModel(nn.Linear(2, 2))
        with caplog.at_level(logging.WARNING, logger="shardwright"):
            for _ in range(2):
                smp.save_checkpoint(tmp_path, "one", partial=partial, model=model, user_content=content)
            said = [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()]
            found = smp.resume_from_checkpoint(tmp_path, "one", partial=partial, model=model)
        smp.save_checkpoint(tmp_path, "two", partial=partial, model=model, user_content=nn.Linear(1, 1))
        nothing = smp.resume_from_checkpoint(tmp_path, "two", partial=partial, model=model)
        smp.save_checkpoint(tmp_path, "three", partial=partial, model=model, user_content=found)
        again = smp.resume_from_checkpoint(tmp_path, "three", partial=partial, model=model)
    finally:
        smp.shutdown()
        content["args"].file.close()
    assert len(said) == 1
    for one in (found, again):
        assert {key: one[key] for key in ("model_config", "shapes", "buffer_names", "total_steps")} == {
            "model_config": config.to_dict(),
            "shapes": {"weight": torch.Size([3, 4])},
            "buffer_names": ["a", "b"],
            "total_steps": 3,
        }
        assert one["args"].lr == 1e-3
        assert one["cli_args"]["dtype"] is torch.bfloat16
        with pytest.raises(smp.LeftOutError, match=r"user_content\['schedule'\] is not there: .* a function"):
            one["schedule"]
        with pytest.raises(smp.LeftOutError, match=r"DataLoader"):
            one["cli_args"]["loader"]
        with pytest.raises(smp.LeftOutError, match=r"user_content\['args'\].file is not there: .*TextIOWrapper"):
            one["args"].file.read()
    with pytest.raises(smp.LeftOutError, match="user_content is not there"):
        nothing["step"]


def test_what_training_goes_on_with_is_refused_and_not_left_out(tmp_path: Path) -> None:
    """The options of an optimizer, and what a module keeps."""

    class Keeps(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"f": open}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    smp.init({})
    try:
        model = smp.DistributedModel(Keeps(2, 2))
        with pytest.raises(smp.CheckpointError, match="builtin_function_or_method, which cannot be saved"):
            smp.save_checkpoint(tmp_path, "one", model=model)
    finally:
        smp.shutdown()
