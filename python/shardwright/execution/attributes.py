"""Separate values, for each microbatch, of module attributes that forwards set and later read."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

from torch import nn

from shardwright.execution.children import MISSING, own_value, set_own
from shardwright.execution.task import running_task, state_write


class _Buffer(NamedTuple):
    """Placeholder for a buffer that a forward has registered."""

    tensor: Any
    is_saved: bool


def _value(module: nn.Module, name: str) -> Any:
    own = vars(module)
    if name in own:
        return own[name]
    if name in own["_buffers"]:
        return _Buffer(own["_buffers"][name], name not in own["_non_persistent_buffers_set"])
    return own_value(module, name)


def _put_value(module: nn.Module, name: str, value: Any) -> None:
    own = vars(module)
    is_buffer = type(value) is _Buffer
    if is_buffer:
        own["_buffers"][name] = value.tensor
    else:
        own["_buffers"].pop(name, None)
    if is_buffer and not value.is_saved:
        own["_non_persistent_buffers_set"].add(name)
    else:
        own["_non_persistent_buffers_set"].discard(name)
    set_own(module, name, MISSING if is_buffer else value)


class Attributes:
    """Give each microbatch its own values of the attributes that forwards set before they read them.

    Without this, a module that sets ``self.mask``, calls a module on another rank and then reads ``self.mask`` could
    read the value of another microbatch, whose forward ran on this rank in the meantime.

    That each forward sets these attributes first is known from a trace of a single forward. In one process, a
    microbatch that reads an attribute before setting it would find the value of an earlier microbatch. Here, if
    `hides` is set, the attributes are missing in every microbatch but the first until that microbatch sets them.
    """

    def __init__(self) -> None:
        """Create an object that manages no attributes yet."""
        self._places: list[tuple[weakref.ref[nn.Module], str]] = []
        self._numbers: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()
        self._kept: dict[int, list[Any]] = {}
        self._microbatch: int | None = None
        #: Whether attributes that a microbatch has not set are hidden from it. False if microbatches run one after
        #: another.
        self.hides = False
        #: For each attribute, its value before the step, and the microbatches that have set it in this step.
        self._before: list[Any] = []
        self._set_by: list[set[int]] = []
        self._classes: dict[type[nn.Module], Any] = {}

    def add(self, module: nn.Module, name: str) -> None:
        """Keep a separate value of this attribute of `module` for each microbatch."""
        self._numbers.setdefault(module, {})[name] = len(self._places)
        self._places.append((weakref.ref(module), name))
        self._before.append(_value(module, name))
        self._set_by.append(set())
        self._watch_class(type(module))

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._places)

    def begin_step(self) -> None:
        """Begin a step: record the values to restore if the step fails."""
        if self._places:
            self._before = self._values()
            self._set_by = [set() for _ in self._places]

    def enter(self, microbatch: int) -> None:
        """Restore the microbatch's values, because a task of it gets the turn."""
        if microbatch == self._microbatch:
            return
        if self._places:
            if self._microbatch is not None:
                self._kept[self._microbatch] = self._values()
            found = self._kept.pop(microbatch, [])
            if self.hides:
                fresh = self._before if microbatch == 0 else [MISSING] * len(self._places)
                found = [*found, *fresh[len(found) :]]  # attributes may have been added since these values were saved
            self._put(found)
        self._microbatch = microbatch

    def is_set(self, module: nn.Module, name: str, microbatch: int) -> None:
        """Record that a microbatch sets an attribute."""
        number = self._numbers.get(module, {}).get(name)
        if number is not None:
            self._set_by[number].add(microbatch)

    def set_by_some(self, num_microbatches: int) -> tuple[nn.Module, str] | None:
        """Return an attribute with a class default that only some microbatches have set in this step; None if none."""
        for number, (reference, name) in enumerate(self._places):
            module = reference()
            if module is not None and 0 < len(self._set_by[number]) < num_microbatches and hasattr(type(module), name):
                return module, name
        return None

    def end_step(self) -> None:
        """End a step: leave each attribute as the last microbatch that set it did, as if microbatches ran in order."""
        if self._places and self._microbatch is not None and (self._kept or self.hides):
            self._kept[self._microbatch] = self._values()
            left = []
            for number, before in enumerate(self._before):
                last = max((m for m in self._set_by[number] if m in self._kept), default=None)
                left.append(before if last is None else self._kept[last][number])
            self._put(left)
        self._kept.clear()
        self._microbatch = None

    def rollback(self) -> None:
        """Restore the values from before the step."""
        self._kept.clear()
        self._microbatch = None
        self._put(self._before)

    def close(self) -> None:
        """Restore the ``__getattr__`` methods of the modules' classes."""
        for kind, own in self._classes.items():
            if own is None:
                del kind.__getattr__
            else:
                kind.__getattr__ = own  # type: ignore[method-assign]
        self._classes.clear()

    def _values(self) -> list[Any]:
        return [_value(module, n) if (module := of()) is not None else MISSING for of, n in self._places]

    def _put(self, values: list[Any]) -> None:
        for (reference, name), value in zip(self._places, values, strict=False):
            if (module := reference()) is not None:
                _put_value(module, name, value)

    def _watch_class(self, kind: type[nn.Module]) -> None:
        """Replace ``__getattr__`` of a class, to detect reads of hidden attributes."""
        if kind in self._classes:
            return
        missing = kind.__getattr__

        @functools.wraps(missing)
        def __getattr__(module: nn.Module, name: str) -> Any:
            if self.hides and (task := running_task()) is not None and task.microbatch > 0:
                number = self._numbers.get(module, {}).get(name)
                if number is not None and task.microbatch not in self._set_by[number]:
                    raise state_write(
                        task,
                        f"attribute {name!r} of a {kind.__name__} was read before it was set, where the trace saw it "
                        "set first: only microbatches that run one after another find there what one process would",
                    )
            return missing(module, name)

        self._classes[kind] = vars(kind).get("__getattr__")
        kind.__getattr__ = __getattr__  # type: ignore[method-assign]
