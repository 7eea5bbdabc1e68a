"""Adapters of ``peft`` that a step function switches: in its microbatch only, on every rank that its calls reach.

What ``disable_adapter()`` and ``set_adapter`` set on each layer in one process would be set on one rank only, and for
all microbatches that run there meanwhile. So a switch is kept beside the task, and sent with calls; what is computed
again in the backward runs under the switches of its first computation. ``requires_grad`` stays as it is outside.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.errors import FrameError

#: The argument under which switches are sent.
_ARGUMENT = "__shardwright_adapters__"


class Switch(NamedTuple):
    """What adapters of a part of a model are switched to.

    Attributes:
        disabled: Whether all are disabled; None for what is set outside of steps.
        active: Those that are active if not; None for those that are set outside of steps.
        frozen: Whether those are used and not trained.
        rows: The adapter of each row of a batch, as ``adapter_names`` of a call says; None if it does not.
    """

    disabled: bool | None = None
    active: tuple[str, ...] | None = None
    frozen: bool = False
    rows: tuple[str, ...] | None = None


class _Part(NamedTuple):
    """A part of a model that asks which adapters are active: a layer with adapters, or what ``peft`` made of the model.

    Attributes:
        model: The model's id.
        number: Its number among those of the model, the same on all ranks.
    """

    model: int
    number: int


_UNSWITCHED = Switch()
#: In a task of a step: what parts are switched to, where they are.
_switches: ContextVar[dict[_Part, Switch] | None] = ContextVar("shardwright_adapters", default=None)
_parts: weakref.WeakKeyDictionary[nn.Module, _Part] = weakref.WeakKeyDictionary()
#: How many parts a model has.
_counts: dict[int, int] = {}


def number_parts(parts: Sequence[nn.Module], model_id: int) -> None:
    """Let adapters of these parts of a model be switched in steps."""
    _counts[model_id] = len(parts)
    for number, part in enumerate(parts):
        _parts[part] = _Part(model_id, number)


def is_known(part: nn.Module) -> bool:
    """Return whether this is code of a step, and a part of a model of the job."""
    return _switches.get() is not None and part in _parts


# --- tasks


def begin_task() -> None:
    """Begin a task of a step, in a context of its own."""
    _switches.set({})


def end_step_function() -> None:
    """Raise :class:`FrameError` if a step function has left adapters switched."""
    if _switches.get():
        raise FrameError(
            "the step function has switched adapters by set_adapter, and not back: other microbatches, and what "
            "follows the step, would not see it. Switch them back in it, or switch them outside of it, on every rank"
        )


def in_microbatch(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a step function for a microbatch, on a rank that runs the whole model."""
    token = _switches.set({})
    try:
        result = function(*args, **kwargs)
        end_step_function()
        return result
    finally:
        _switches.reset(token)


def in_step() -> bool:
    """Return whether this is code of a step."""
    return _switches.get() is not None


def are_switched() -> bool:
    """Return whether adapters are switched in this task."""
    return bool(_switches.get())


def with_switches(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call to another rank, with the switches that it runs under."""
    switches = _switches.get()
    return {**kwargs, _ARGUMENT: _encoded(switches)} if switches else kwargs


@contextmanager
def received(kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a block under the switches that came with a call; gives the arguments without them."""
    told = kwargs.get(_ARGUMENT)
    if told is None:
        yield kwargs
        return
    token = _switches.set(_decoded(told))
    try:
        yield {name: value for name, value in kwargs.items() if name != _ARGUMENT}
    finally:
        _switches.reset(token)


@contextmanager
def unswitched() -> Iterator[None]:
    """Run a block as outside of steps: a trace is to see the adapters that a first call may have disabled."""
    if not _switches.get():
        yield
        return
    token = _switches.set({})
    try:
        yield
    finally:
        _switches.reset(token)


class _Again(functools.partial[Any]):
    """A function that is computed again in the backward, under the switches of its first computation."""

    switches: dict[_Part, Switch]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        token = _switches.set(dict(self.switches))
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _switches.reset(token)


def as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs under the switches of now whenever it is called, in a step."""
    switches = _switches.get()
    if switches is None:
        return function
    remembering = _Again(function)
    remembering.switches = dict(switches)
    return remembering


def _encoded(switches: Mapping[_Part, Switch]) -> list[Any]:
    """What switches are sent as: models, their switches, and the numbers of their parts, None for all of them."""
    groups: dict[tuple[int, Switch], list[int]] = {}
    for part, switch in switches.items():
        groups.setdefault((part.model, switch), []).append(part.number)
    return [
        [
            model,
            [list(value) if isinstance(value, tuple) else value for value in switch],
            None if len(numbers) == _counts[model] else numbers,
        ]
        for (model, switch), numbers in groups.items()
    ]


def _decoded(told: Sequence[Any]) -> dict[_Part, Switch]:
    found: dict[_Part, Switch] = {}
    for model, values, numbers in told:
        given: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
        switched = Switch(*given)
        for number in range(_counts[model]) if numbers is None else numbers:
            found[_Part(model, number)] = switched
    return found


# --- parts


def switch_of(part: nn.Module) -> Switch:
    """Return what a part is switched to in this task."""
    switches = _switches.get()
    if not switches or (place := _parts.get(part)) is None:
        return _UNSWITCHED
    return switches.get(place, _UNSWITCHED)


def switch(part: nn.Module, **change: Any) -> None:
    """Switch a part, in this task; no more if that is what is set outside of steps."""
    switches, place, own = _switches.get(), _parts[part], vars(part)
    assert switches is not None, "switches are those of a step"
    switched = switches.get(place, _UNSWITCHED)._replace(**change)
    if switched.disabled is own.get("_adapters_disabled", own.get("_disable_adapters", False)):
        switched = switched._replace(disabled=None)
    outside = own.get("active_adapter", own.get("_active_adapter", ()))
    if not switched.frozen and switched.active == ((outside,) if isinstance(outside, str) else tuple(outside)):
        switched = switched._replace(active=None)
    if switched == _UNSWITCHED:
        switches.pop(place, None)
    else:
        switches[place] = switched


def check_trained(part: Any, switched: Switch) -> None:
    """Raise :class:`FrameError` if other adapters would be trained than those that require gradients outside of steps.

    Args:
        part: A layer that is about to run.
        switched: What it is switched to.
    """
    if switched.active is None or switched.disabled or not torch.is_grad_enabled():
        return
    held = [
        parameter
        for name in part.adapter_layer_names
        for adapter, entry in getattr(part, name).items()
        if adapter in switched.active
        for parameter in (entry.parameters() if isinstance(entry, nn.Module) else [entry])
    ]
    is_trained = any(parameter.requires_grad for parameter in held)
    if held and is_trained == switched.frozen:
        names, do = " and ".join(map(repr, switched.active)), "require" if is_trained else "do not require"
        raise FrameError(
            f"the step function has set the adapter {names} {'' if is_trained else 'not '}to be frozen, and its "
            f"weights {do} gradients outside of it. What is trained is set there, on every rank: "
            f"model.set_requires_grad({list(switched.active)!r}, {not is_trained}); or run it under torch.no_grad(), "
            f"or give set_adapter inference_mode={not switched.frozen}"
        )
