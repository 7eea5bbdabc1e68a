"""What a trainer keeps in plain values: numbers, strings, tensors and arrays, and containers of them.

They are attributes of the trainer, and of objects of a script's classes that are its attributes.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

#: The attributes of a trainer, or of an object that is one of these, by its name and theirs.
Path = tuple[str, ...]
_NO_MARK = object()
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_DICTS = (dict, Counter, OrderedDict, defaultdict)
#: What makes entries that are missing, where that can be sent.
_FACTORIES = (None, dict, float, int, list, set)
_DEQUE = "shardwright: a deque"
_CONTAINERS = (list, tuple, set, frozenset, deque)
#: What ``transformers.Trainer`` is given, or keeps for itself, and no code in a step counts in.
_OF_TRAINER = {
    "accelerator",
    "args",
    "callback_handler",
    "control",
    "data_collator",
    "eval_dataset",
    "lr_scheduler",
    "optimizer",
    "processing_class",
    "state",
    "train_dataset",
}
#: Whose objects are no counters of a script.
_LIBRARIES = {
    "accelerate",
    "builtins",
    "datasets",
    "functools",
    "numpy",
    "peft",
    "shardwright",
    "torch",
    "transformers",
}
_NO_COUNTERS = (torch.nn.Module, torch.optim.Optimizer, Dataset, DataLoader, Sampler, type)


def _owners(trainer: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the attributes of a trainer, and of objects that are its attributes."""
    own = {name: value for name, value in vars(trainer).items() if name not in _OF_TRAINER}
    yield (), own
    for name, value in own.items():
        root = type(value).__module__.partition(".")[0]
        if root not in _LIBRARIES and hasattr(value, "__dict__") and not isinstance(value, (*_NO_COUNTERS, Callable)):  # type: ignore[arg-type]
            yield (name,), vars(value)


def marks(trainer: Any) -> dict[Path, Any]:
    """Return of each attribute with plain values what differs once it has changed."""
    found = {(*path, name): _mark(value) for path, own in _owners(trainer) for name, value in own.items()}
    return {path: mark for path, mark in found.items() if mark is not _NO_MARK}


def changes(trainer: Any, before: dict[Path, Any]) -> list[tuple[Path, Any]]:
    """Return the plain values that have changed since marks were made, in containers that can be sent."""
    changed = [path for path, mark in marks(trainer).items() if before.get(path, _NO_MARK) != mark]
    return [(path, _plain(vars(_owner_of(trainer, path))[path[-1]])) for path in changed]


def take(trainer: Any, told: list[tuple[Path, Any]]) -> None:
    """Give a trainer plain values that have changed on another one."""
    for path, value in told:
        owner = _owner_of(trainer, path)
        setattr(owner, path[-1], _put(vars(owner).get(path[-1]), value))


def _owner_of(trainer: Any, path: Path) -> Any:
    """Return the object whose attribute a path is: the trainer, or one of its attributes; None if there is none."""
    for name in path[:-1]:
        trainer = vars(trainer).get(name)
    return trainer


def _mark(value: Any) -> Any:
    """Return what differs once a value has changed, without a copy of its tensors."""
    if isinstance(value, _NUMBERS):
        return (type(value), repr(value))
    if isinstance(value, torch.Tensor):
        return _NO_MARK if isinstance(value, torch.nn.Parameter) else (id(value), value._version)
    if isinstance(value, np.ndarray):
        return _NO_MARK if value.dtype.hasobject else (value.dtype.str, value.shape, hash(value.tobytes()))
    if isinstance(value, dict):  # what is plain in it
        entries = [(_mark(key), _mark(one)) for key, one in value.items()]
        kept = [entry for entry in entries if entry[1] is not _NO_MARK]
        return _NO_MARK if entries and not kept else (type(value), kept)
    if type(value) not in _CONTAINERS:
        return _NO_MARK
    parts = [_mark(one) for one in value]
    return _NO_MARK if any(mark is _NO_MARK for mark in parts) else (type(value), parts)


def _plain(value: Any) -> Any:
    """Return a plain value in containers that can be sent."""
    if isinstance(value, dict):
        is_known = type(value) in _DICTS and getattr(value, "default_factory", None) in _FACTORIES
        sent = copy.copy(value) if is_known else dict(value)
        sent.clear()
        sent.update({key: _plain(one) for key, one in value.items() if _mark(one) is not _NO_MARK})
        return sent
    if isinstance(value, deque):
        return (_DEQUE, value.maxlen, [_plain(one) for one in value])
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(one) for one in value)
    return value


def _put(own: Any, value: Any) -> Any:
    """Return what stands for a plain value: what is there already, changed in place where others may hold it."""
    if isinstance(value, tuple) and value and isinstance(value[0], str) and value[0] == _DEQUE:
        _, maxlen, entries = value
        own = own if isinstance(own, deque) and own.maxlen == maxlen else deque(maxlen=maxlen)
        return _filled(own, entries)
    if isinstance(value, tuple):
        return tuple(_put(None, one) for one in value)
    if isinstance(value, dict):
        is_of_type = isinstance(own, dict) and (type(own) is type(value) or type(value) is dict)
        stays = {key: one for key, one in own.items() if _mark(one) is _NO_MARK} if is_of_type else {}
        merged = {key: _put(own.get(key) if is_of_type else None, one) for key, one in value.items()}
        own = own if is_of_type else value
        own.clear()
        own.update({**stays, **merged})
        return own
    if isinstance(value, list):
        return _filled(own if isinstance(own, list) else [], value)
    return value


def _filled(own: Any, entries: list[Any]) -> Any:
    entries = [_put(None, one) for one in entries]
    own.clear()
    own.extend(entries)
    return own


def kept(trainer: Any) -> Callable[[], None]:
    """Return what puts the plain attributes of a trainer back to what they are now, in place."""
    before = marks(trainer)
    copies: dict[Path, tuple[Any, Any]] = {}
    for path in before:
        value = vars(_owner_of(trainer, path))[path[-1]]
        copies[path] = value, copy.deepcopy(_plain(value))

    def put_back() -> None:
        for path, mark in marks(trainer).items():
            owner, name = _owner_of(trainer, path), path[-1]
            if path not in copies:
                delattr(owner, name)
            elif before[path] != mark:
                setattr(owner, name, _undone(*copies[path]))
        for path, (value, own) in copies.items():
            owner = _owner_of(trainer, path)
            if owner is not None and path[-1] not in vars(owner):
                setattr(owner, path[-1], _undone(value, own))

    return put_back


def _undone(value: Any, before: Any) -> Any:
    """Return a value as it was, in place where others may hold it."""
    if isinstance(value, torch.Tensor) and value.shape == before.shape:
        with torch.no_grad():
            return value.copy_(before)
    if isinstance(value, np.ndarray) and value.shape == before.shape:
        value[...] = before
        return value
    return _put(value, before)
