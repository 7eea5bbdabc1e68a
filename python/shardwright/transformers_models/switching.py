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
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.errors import FrameError
from shardwright.patches import original_of, replaced

#: The argument under which switches are sent.
_ARGUMENT = "__shardwright_adapters__"


class Switch(NamedTuple):
    """What adapters of a model are switched to.

    Attributes:
        disabled: Whether all are disabled.
        active: Those that are active if not; empty for those that are set outside of steps.
    """

    disabled: bool
    active: tuple[str, ...] = ()


Switches = Mapping[int, Switch]
_NONE: Switches = MappingProxyType({})
#: In a task of a step: what adapters of models are switched to, by the model's id, where they are.
_switches: ContextVar[Switches | None] = ContextVar("shardwright_adapters", default=None)
#: The models, by what ``peft`` made of them, and by their layers.
_models: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def install(module: nn.Module, model_id: int, installed: ExitStack) -> None:
    """Let adapters of a model that several ranks divide be switched in steps, for as long as the job runs."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        return
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for part in [one for one in module.modules() if isinstance(one, nn.Module)]:
        if part is module or isinstance(part, (BaseTuner, BaseTunerLayer, AuxiliaryTrainingWrapper)):
            _models[part] = model_id
    installed.enter_context(
        replaced(peft.PeftModel, {"disable_adapter": _disable_adapter, "set_adapter": _set_adapter, **_OF_MODELS})
    )
    installed.enter_context(replaced(BaseTuner, _OF_MODELS))
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
    return {**kwargs, _ARGUMENT: [[model, switch.disabled, *switch.active] for model, switch in switches.items()]}


@contextmanager
def received(kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a block under the switches that came with a call; gives the arguments without them."""
    told = kwargs.get(_ARGUMENT)
    if told is None:
        yield kwargs
        return
    token = _switches.set({model: Switch(disabled, tuple(names)) for model, disabled, *names in told})
    try:
        yield {name: value for name, value in kwargs.items() if name != _ARGUMENT}
    finally:
        _switches.reset(token)


def in_step() -> bool:
    """Return whether this is code of a step."""
    return _switches.get() is not None


def _of(layer: nn.Module) -> Switch | None:
    """Return what the adapters of a layer's model are switched to; None if they are not."""
    switches = _switches.get()
    if not switches or (switch := switches.get(_models.get(layer, -1))) is None:
        return None
    _check_grad_mode(type(layer).__name__)
    return switch


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
    before = _switched_to(known).disabled
    _switch(model, known, _switched_to(known)._replace(disabled=True))
    try:
        yield
    finally:
        _switch(model, known, _switched_to(known)._replace(disabled=before))


def _set_adapter(model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """Replace ``PeftModel.set_adapter``."""
    switches, known = _switches.get(), _models.get(model)
    if switches is None or known is None:
        original_of(_set_adapter)(model, adapter_name, *args, **kwargs)
        return
    if adapter_name not in model.peft_config:
        raise ValueError(f"Adapter {adapter_name} not found.")
    _switch(model, known, _switched_to(known)._replace(active=(adapter_name,)))


def _switched_to(model_id: int) -> Switch:
    return (_switches.get() or _NONE).get(model_id, Switch(disabled=False))


def _switch(model: Any, model_id: int, switch: Switch) -> None:
    """Switch the adapters of a model, in this task; no more if that is what is set outside of steps."""
    if switch.active == (vars(model)["active_adapter"],):
        switch = switch._replace(active=())
    others = {one: own for one, own in (_switches.get() or _NONE).items() if one != model_id}
    _switches.set({**others, model_id: switch} if switch != Switch(disabled=False) else others)


def _disable_adapters(layer: Any) -> bool:
    switch = _of(layer)
    return bool(layer._disable_adapters) if switch is None else switch.disabled or bool(layer._disable_adapters)


def _active_adapter(layer: Any) -> Any:
    switch = _of(layer)
    return list(switch.active) if switch is not None and switch.active else layer._active_adapter


def _active_adapters(layer: Any) -> list[str]:
    active = _active_adapter(layer)
    return [active] if isinstance(active, str) else active


def _active_adapter_of_model(model: Any) -> Any:
    """Replace the attribute of that name, which is then that of the task."""
    try:
        own = vars(model)["active_adapter"]
    except KeyError:
        raise AttributeError(f"{type(model).__name__!r} object has no attribute 'active_adapter'") from None
    active = _switched_to(_models.get(model, -1)).active
    return active[0] if active else own


def _set_active_adapter_of_model(model: Any, value: Any) -> None:
    vars(model)["active_adapter"] = value


_OF_MODELS = {"active_adapter": _Replaced(_active_adapter_of_model, _set_active_adapter_of_model)}
_OF_LAYERS = {"disable_adapters": _Replaced(_disable_adapters), "active_adapter": _Replaced(_active_adapter)}
_OF_WRAPPERS = {
    "disable_adapters": _Replaced(_disable_adapters),
    "active_adapter": _Replaced(_active_adapter),
    "active_adapters": _Replaced(_active_adapters),
}
