"""What code in a step leaves on a trainer reaches the other ranks of its pipeline, where that code does not run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.job.objects import allgather
from shardwright.job.ranks import PP_GROUP
from shardwright.job.runtime import current_runtime

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: Of what can be told whether it has changed, and be sent; other attributes stay what they are on each rank.
_CONTAINERS = (list, tuple, set, frozenset, deque)
_NO_MARK = object()


@contextmanager
def carried(trainer: Any) -> Iterator[None]:
    """Give all ranks of a pipeline the plain attributes that the block has changed on the first one.

    Plain are numbers, strings and tensors, and containers of them. All ranks call this.
    """
    if current_runtime().place.pp_size == 1:
        yield
        return
    before = _marks(trainer)
    yield
    after = _marks(trainer)
    changed = [name for name, mark in after.items() if before.get(name, _NO_MARK) != mark]
    told = allgather({name: _sent(vars(trainer)[name]) for name in changed}, PP_GROUP)[0]
    if current_runtime().place.pp_rank:
        for name, value in told.items():
            setattr(trainer, name, _put(vars(trainer).get(name), value))


def _marks(trainer: Any) -> dict[str, Any]:
    marks = {name: _mark(value) for name, value in vars(trainer).items()}
    return {name: mark for name, mark in marks.items() if mark is not _NO_MARK}


def _mark(value: Any) -> Any:
    """Return what differs once a value has changed, without a copy of its tensors."""
    if isinstance(value, _PLAIN):
        return (type(value), repr(value))
    if isinstance(value, torch.Tensor):
        return _NO_MARK if isinstance(value, torch.nn.Parameter) else (id(value), value._version)
    if isinstance(value, dict):
        parts = [one for pair in value.items() for one in pair]
    elif type(value) in _CONTAINERS:
        parts = list(value)
    else:
        return _NO_MARK
    marks = [_mark(one) for one in parts]
    return _NO_MARK if any(mark is _NO_MARK for mark in marks) else (type(value), marks)


def _sent(value: Any) -> Any:
    """Return a value in containers that can be sent."""
    if isinstance(value, dict):
        return {key: _sent(one) for key, one in value.items()}
    if isinstance(value, (list, deque)):
        return [_sent(one) for one in value]
    return value


def _put(own: Any, value: Any) -> Any:
    """Return what stands for a value that was sent: what this rank has, changed in place where others may hold it."""
    if isinstance(own, dict) and isinstance(value, dict):
        merged = {key: _put(own.get(key), one) for key, one in value.items()}
        own.clear()
        own.update(merged)
        return own
    if isinstance(own, (list, deque)) and isinstance(value, list):
        own.clear()
        own.extend(value)
        return own
    return value
