"""What an optimizer keeps besides its parameters and their state: options of groups, attributes, other state."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

#: Where the classes are that ``smp.DistributedOptimizer`` puts before that of an optimizer.
_OURS = "shardwright.optimizer."
#: Attributes that every optimizer has, and that say nothing of its rule.
NO_OPTIONS = frozenset({"param_groups", "state", "defaults", "step"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: How deep lists, dicts and objects are looked into.
_LEVELS = 4


def own_attributes(optimizer: Optimizer) -> list[str]:
    """Return the names of the attributes that an optimizer has without ``smp.DistributedOptimizer``.

    Args:
        optimizer: The optimizer.
    """
    ours = {name for one in type(optimizer).__mro__ if one.__module__.startswith(_OURS) for name in _annotated(one)}
    return [name for name in vars(optimizer) if name not in ours]


def _annotated(kind: type) -> Iterable[str]:
    return (*inspect.get_annotations(kind), "_global_grad_norm")


class _Saved(NamedTuple):
    """A value, and what was in it.

    Attributes:
        value: The value itself.
        inside: A copy of a tensor, or what a container or an object holds.
        is_known: Whether it can be told from another, and restored.
    """

    value: Any
    inside: Any
    is_known: bool


class Besides:
    """What an optimizer keeps besides its parameters and their state, as it was at one time.

    Numbers, names, tensors, and lists, dicts and objects of them are compared and restored. Anything else is left.
    """

    def __init__(self, optimizer: Optimizer, *, tensors: bool = True) -> None:
        """Save what it keeps now.

        Args:
            optimizer: The optimizer.
            tensors: Whether tensors of several elements count, which may be state of parameters.
        """
        self._tensors = tensors
        ours = vars(optimizer).keys() - set(own_attributes(optimizer)) | NO_OPTIONS
        spaces: list[tuple[str, Any, Callable[[Any], bool]]] = [
            ("the attribute", vars(optimizer), lambda key: key not in ours and not key.endswith("_hooks")),
            ("optimizer.state", optimizer.state, lambda key: not isinstance(key, torch.Tensor)),
        ]
        for number, group in enumerate(optimizer.param_groups):
            spaces.append((f"the option of group {number}", group, lambda key: key not in ("params", "param_names")))
        self._spaces = [
            (label, space, is_own, {key: self._saved(space[key]) for key in space if is_own(key)})
            for label, space, is_own in spaces
        ]

    def restore(self) -> None:
        """Put everything back as it was."""
        for _, space, is_own, saved in self._spaces:
            for key in [key for key in space if is_own(key) and key not in saved]:
                if self._saved(space[key]).is_known:
                    del space[key]
            for key, one in saved.items():
                space[key] = _restored(one)

    def difference(self, other: Besides, since: Besides | None = None) -> str | None:
        """Return what differs in another optimizer of the same class, or at another time; None if nothing does.

        Args:
            other: The other.
            since: Was saved before a step: what that has not changed does not count.
        """
        there = {label: saved for label, _, _, saved in other._spaces}
        at_first = {} if since is None else {label: saved for label, _, _, saved in since._spaces}
        for label, _, _, saved in self._spaces:
            if (theirs := there.get(label)) is None:
                continue  # a group that the other has no parameter of
            before = at_first.get(label, {})
            for key in (*saved, *(key for key in theirs if key not in saved)):
                if key in before and key in saved and _alike(before[key], saved[key]):
                    continue
                if key not in saved or key not in theirs:
                    if (saved.get(key) or theirs[key]).is_known:
                        return f"{label} {key!r}"
                elif not _alike(saved[key], theirs[key]):
                    return f"{label} {key!r}"
        return None

    def _saved(self, value: Any, levels: int = _LEVELS) -> _Saved:
        if isinstance(value, _PLAIN):
            return _Saved(value, None, True)
        if type(value) is torch.Tensor:
            is_known = value.layout is torch.strided and (self._tensors or value.numel() == 1)
            return _Saved(value, value.detach().clone() if is_known else None, is_known)
        if levels == 0:
            return _Saved(value, None, False)
        if isinstance(value, (list, tuple, deque)):
            each = [self._saved(one, levels - 1) for one in value]
            return _Saved(value, each, all(one.is_known for one in each))
        if isinstance(value, set):
            return _Saved(value, set(value), all(isinstance(one, _PLAIN) for one in value))
        entries = value if isinstance(value, dict) else _vars(value)
        if entries is None or any(isinstance(key, torch.Tensor) for key in entries):
            return _Saved(value, None, False)
        of_keys = {key: self._saved(one, levels - 1) for key, one in entries.items()}
        is_known = all(one.is_known for one in of_keys.values())
        return _Saved(value, of_keys if is_known or isinstance(value, dict) else None, is_known)


def _vars(value: Any) -> Any:
    is_other = isinstance(value, (torch.Tensor, nn.Module, Optimizer, type)) or callable(value)
    return None if is_other else getattr(value, "__dict__", None)


@torch.no_grad()
def _restored(one: _Saved) -> Any:
    """Return a value with what was in it."""
    value, inside = one.value, one.inside
    if inside is None:
        return value
    if isinstance(value, torch.Tensor):
        value.copy_(inside)
    elif isinstance(value, (list, deque)):
        each = [_restored(item) for item in inside]
        value.clear()
        value.extend(each)
    elif isinstance(value, tuple):
        for item in inside:
            _restored(item)
    elif isinstance(value, set):
        value.clear()
        value.update(inside)
    else:
        entries = value if isinstance(value, dict) else vars(value)
        kept = {key: _restored(item) for key, item in inside.items()}
        entries.clear()
        entries.update(kept)
    return value


def _alike(one: _Saved, other: _Saved) -> bool:
    if not (one.is_known and other.is_known):
        return True
    if type(one.value) is not type(other.value):
        return False
    if isinstance(one.inside, torch.Tensor):
        return one.inside.shape == other.inside.shape and bool(torch.equal(one.inside.cpu(), other.inside.cpu()))
    if isinstance(one.inside, list):
        return len(one.inside) == len(other.inside) and all(map(_alike, one.inside, other.inside))
    if isinstance(one.inside, Mapping):
        return one.inside.keys() == other.inside.keys() and all(
            _alike(value, other.inside[key]) for key, value in one.inside.items()
        )
    if isinstance(one.inside, set):
        return bool(one.inside == other.inside)
    return bool(one.value == other.value) or (one.value != one.value and other.value != other.value)
