"""Adapters of ``peft`` that a step function switches: in its microbatch only, on every rank that its calls reach.

What ``disable_adapter()`` and ``set_adapter`` of the model set on each of its layers in one process would be set on one
rank only, and for all microbatches that run there meanwhile. So a switch is kept beside the task, and sent with calls.
Gradients are not computed under it, since the backward, and what it computes again, would not know of it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from shardwright.errors import FrameError
from shardwright.patches import original_of, replaced

#: The argument under which switches are sent.
_ARGUMENT = "__shardwright_adapters__"
Switches = Mapping[int, tuple[str, ...]]
_NONE: Switches = MappingProxyType({})
#: In a task of a step: the active adapters of models, by the model's id, where they are not those set outside of steps.
_switches: ContextVar[Switches | None] = ContextVar("shardwright_adapters", default=None)
#: The models, by what ``peft`` made of them, and by their layers.
_models: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def install(module: nn.Module, model_id: int, installed: ExitStack) -> None:
    """Let adapters of a model that several ranks divide be switched in steps, for as long as the job runs."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for part in [one for one in module.modules() if isinstance(one, nn.Module)]:
        if part is module or isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            _models[part] = model_id
    installed.enter_context(
        replaced(peft.PeftModel, {"disable_adapter": _disable_adapter, "set_adapter": _set_adapter})
    )
    installed.enter_context(replaced(BaseTunerLayer, _OF_LAYERS))
    installed.enter_context(replaced(AuxiliaryTrainingWrapper, _OF_WRAPPERS))


class _Replaced(property):
    """A property that can say what it replaces."""


def begin_task() -> None:
    """Begin a task of a step, in a context of its own."""
    _switches.set(_NONE)


def end_step_function() -> None:
    """Raise :class:`FrameError` if a step function has left adapters switched."""
    if _switches.get():
        raise FrameError(
            "the step function has switched adapters by set_adapter, and not back: other microbatches, and what "
            "follows the step, would not see it. Switch them back in it, or switch them outside of it, on every rank"
        )


def are_switched() -> bool:
    """Return whether adapters are switched in this task."""
    return bool(_switches.get())


def with_switches(kwargs: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Return the arguments of a call to another rank, with the switches that it runs under."""
    switches = _switches.get()
    if not switches:
        return kwargs
    _check_grad_mode(module)
    return {**kwargs, _ARGUMENT: [[model, *names] for model, names in switches.items()]}


@contextmanager
def received(kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a block under the switches that came with a call; gives the arguments without them."""
    told = kwargs.get(_ARGUMENT)
    if told is None:
        yield kwargs
        return
    token = _switches.set({model: tuple(names) for model, *names in told})
    try:
        yield {name: value for name, value in kwargs.items() if name != _ARGUMENT}
    finally:
        _switches.reset(token)


def _of(layer: nn.Module) -> tuple[str, ...] | None:
    """Return the adapters to which those of a layer's model are switched; None if they are not."""
    switches = _switches.get()
    if not switches or (names := switches.get(_models.get(layer, -1))) is None:
        return None
    _check_grad_mode(type(layer).__name__)
    return names


def _check_grad_mode(module: str) -> None:
    if torch.is_grad_enabled():
        raise FrameError(
            f"adapters were switched in the step function, and {module!r} was called with gradients enabled, whose "
            "backward would not know of it: call the model under torch.no_grad() there, or switch adapters outside of "
            "the step function, on every rank"
        )


@contextmanager
def _disable_adapter(model: Any) -> Iterator[None]:
    """Replace ``PeftModel.disable_adapter``."""
    switches, known = _switches.get(), _models.get(model)
    if switches is None or known is None or model.active_peft_config.is_prompt_learning:
        with original_of(_disable_adapter)(model):
            yield
        return
    token = _switches.set({**switches, known: ()})
    try:
        yield
    finally:
        _switches.reset(token)


def _set_adapter(model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """Replace ``PeftModel.set_adapter``."""
    switches, known = _switches.get(), _models.get(model)
    if switches is None or known is None:
        original_of(_set_adapter)(model, adapter_name, *args, **kwargs)
        return
    if adapter_name not in model.peft_config:
        raise ValueError(f"Adapter {adapter_name} not found.")
    others = {one: names for one, names in switches.items() if one != known}
    _switches.set(others if adapter_name == model.active_adapter else {**others, known: (adapter_name,)})


def _disable_adapters(layer: Any) -> bool:
    names = _of(layer)
    return bool(layer._disable_adapters) if names is None else not names


def _active_adapter(layer: Any) -> Any:
    names = _of(layer)
    return list(names) if names else layer._active_adapter


def _active_adapters(layer: Any) -> list[str]:
    active = _active_adapter(layer)
    return [active] if isinstance(active, str) else active


_OF_LAYERS = {"disable_adapters": _Replaced(_disable_adapters), "active_adapter": _Replaced(_active_adapter)}
_OF_WRAPPERS = {
    "disable_adapters": _Replaced(_disable_adapters),
    "active_adapter": _Replaced(_active_adapter),
    "active_adapters": _Replaced(_active_adapters),
}
