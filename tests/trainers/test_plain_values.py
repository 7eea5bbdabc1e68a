"""What a step leaves on a trainer in plain values is told, and what a question leaves there is undone: drawn."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from shardwright.huggingface.plain import changes, kept, marks, take

DRAWS = 200


class Counts:
    """An object of a script's class."""


def _value(drawn: random.Random, depth: int = 2) -> Any:
    number = drawn.randint(0, 9)
    plain = [number, float(number), str(number), None, number > 4, np.float32(number), bytes([number])]
    values = [*plain, torch.full((2,), number), np.full((2,), number)]
    if not depth:
        return drawn.choice(values)
    several = [_value(drawn, depth - 1) for _ in range(drawn.randint(0, 3))]
    named = {str(index): one for index, one in enumerate(several)}
    of_lists = defaultdict(list, {name: [one] for name, one in named.items()})
    containers = [several, tuple(several), deque(several, maxlen=9), named, of_lists, Counter(a=number), {number}]
    return drawn.choice([*values, *containers])


def _trainer(drawn: random.Random) -> Counts:
    trainer: Any = Counts()
    trainer.kept, trainer.function, trainer.mixed = Counts(), len, {"function": len, "number": 1}
    trainer.made = defaultdict(lambda: [0], {"a": [1]})
    for name in "abcd":
        setattr(trainer, name, _value(drawn))
        setattr(trainer.kept, name, _value(drawn))
    return trainer  # type: ignore[no-any-return]


def _changed(value: Any, drawn: random.Random) -> Any:
    """Return a value that has changed, in place where that can be."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and drawn.random() < 0.8:
        value += 1
        return value
    if isinstance(value, (list, deque)) and drawn.random() < 0.8:
        value.append(drawn.randint(0, 9))
        return value
    if isinstance(value, Counter):
        value["b"] += 1
        return value
    if isinstance(value, defaultdict) and value.default_factory is not list:
        value["b"].append(1)
        return value
    is_mixed = isinstance(value, dict) and any(map(callable, value.values()))
    if isinstance(value, dict) and (is_mixed or drawn.random() < 0.8):
        for name in list(value):
            value[name] = _changed(value[name], drawn)
        value["new"] = 1
        return value
    return value if callable(value) else _value(drawn)


def _change(trainer: Any, drawn: random.Random) -> None:
    for owner in (trainer, trainer.kept):
        for name in drawn.sample(sorted(vars(owner)), 3):
            if name != "kept":
                setattr(owner, name, _changed(getattr(owner, name), drawn))
    trainer.late = drawn.randint(0, 9)
    trainer.kept.late = [1]


def _told(value: Any) -> Any:
    """What a trainer keeps, to be compared."""
    if isinstance(value, Counts):
        return {name: _told(one) for name, one in vars(value).items()}
    if isinstance(value, dict):
        return type(value).__name__, {name: _told(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [_told(one) for one in value]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value).__name__, value.tolist()
    return type(value).__name__, value


@pytest.mark.parametrize("seed", range(DRAWS))
def test_what_has_changed_is_told_and_can_be_undone(seed: int) -> None:
    drawn = random.Random(seed)
    trainer = _trainer(drawn)
    other, held = copy.deepcopy(trainer), {name: value for name, value in vars(trainer).items()}
    before, told = marks(trainer), _told(trainer)
    put_back = kept(trainer)
    _change(trainer, drawn)
    changed = changes(trainer, before)
    take(other, copy.deepcopy(changed))
    assert _told(other) == _told(trainer)
    put_back()
    assert _told(trainer) == told
    for name, value in held.items():
        if isinstance(value, (list, dict, deque, torch.Tensor, np.ndarray)):
            assert getattr(trainer, name) is value, name


def test_what_the_trainer_of_transformers_keeps_is_not_searched() -> None:
    class Data(torch.utils.data.Dataset[int]):
        def __init__(self) -> None:
            self.rows = [1, 2]

    trainer: Any = Counts()
    trainer.train_dataset, trainer.data, trainer.rows = [{"row": 1}], Data(), 3
    assert list(marks(trainer)) == [("rows",)]
