"""Methods of ``peft`` that switch adapters, which in a step function switch those of its microbatch only.

Outside of steps they do what they do without this library.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from shardwright.errors import FrameError
from shardwright.frames.guards import GENERATOR
from shardwright.patches import original_of, replaced
from shardwright.transformers_models import adalora, adapter_changes
from shardwright.transformers_models.adapter_changes import Divided
from shardwright.transformers_models.switching import (
    as_now,
    check_trained,
    is_known,
    number_parts,
    switch,
    switch_of,
)

_MARK = "_shardwright_replaces_own"
#: Parts of models that the ranks of a pipeline divide, by now or in the first step.
_pipelined: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def install(module: nn.Module, model_id: int, installed: ExitStack, adapters: Divided, *, pipelined: bool) -> None:
    """Let adapters of a model be switched in steps, for as long as the job runs."""
    if "peft" not in sys.modules:
        return
    import peft
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (peft.PeftModel, BaseTuner, BaseTunerLayer, AuxiliaryTrainingWrapper)
    parts = [part for part in module.modules() if isinstance(part, kinds)]
    if not parts:
        return
    if pipelined:
        _unshare_tables(parts)
        _pipelined.update(parts)
        adalora.install(parts, installed, adapters)
    number_parts(parts, model_id)
    adapter_changes.install(parts, installed, adapters)
    installed.enter_context(replaced(peft.PeftModel, {**_OF_PEFT_MODELS, **_OF_MODELS}))
    installed.enter_context(replaced(BaseTuner, _OF_MODELS))
    installed.enter_context(replaced(BaseTunerLayer, _OF_LAYERS))
    installed.enter_context(replaced(AuxiliaryTrainingWrapper, _OF_WRAPPERS))
    installed.enter_context(replaced(torch_checkpoint, {GENERATOR: _checkpoint_generator}))
    tables: dict[Any, Mapping[str, Callable[..., Any]]] = {
        peft.PeftModel: {"forward": _forward_of_model},
        BaseTuner: {"set_adapter": _set_adapter_of_tuner, "_enable_peft_forward_hooks": _enable_peft_forward_hooks},
        BaseTunerLayer: _METHODS_OF_LAYERS,
        AuxiliaryTrainingWrapper: _METHODS_OF_LAYERS,
    }
    for root, functions in tables.items():
        for kind in {kind: None for part in parts if isinstance(part, root) for kind in type(part).__mro__}:
            if issubclass(kind, root):
                _replace_own(kind, functions, installed)


def _unshare_tables(parts: Sequence[nn.Module]) -> None:
    """Give layers that share a table of buffers one of their own, with the same tensors: they may be on other ranks."""
    from peft.tuners import _buffer_dict

    kind: Any = _buffer_dict.BufferDict
    seen: set[int] = set()
    for part in parts:
        for name, table in part._modules.items():
            if not isinstance(table, kind):
                continue
            if id(table) in seen:
                own = kind(persistent=table.persistent)
                own.update(dict(table._buffers))
                part._modules[name] = own
            seen.add(id(table))


def _replace_own(kind: type, functions: Mapping[str, Callable[..., Any]], installed: ExitStack) -> None:
    """Replace the methods that a class defines itself, by functions that get the replaced one first."""
    for name, function in functions.items():
        own = vars(kind).get(name)
        if own is not None and not hasattr(own, _MARK):
            installed.enter_context(replaced(kind, {name: _replacing(function, own)}))


def _replacing(function: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(part: Any, *args: Any, **kwargs: Any) -> Any:
        return function(own, part, *args, **kwargs)

    setattr(method, _MARK, True)
    return method


class _Replaced(property):
    """A property that can say what it replaces."""


def _checkpoint_generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Replace the generator of ``torch.utils.checkpoint``: what is computed again runs with the adapters of before."""
    yield from original_of(_checkpoint_generator)(as_now(function), *args, **kwargs)


# --- models


@contextmanager
def _disable_adapter(model: Any) -> Iterator[None]:
    """Replace ``PeftModel.disable_adapter``."""
    if not is_known(model) or model.active_peft_config.is_adaption_prompt:
        with original_of(_disable_adapter)(model):
            yield
        return
    was_disabled, of_prompts = model._adapters_disabled, model.active_peft_config.is_prompt_learning
    were_enabled = not of_prompts and any(not layer.disable_adapters for layer in _layers_of(model))
    if not of_prompts:
        model.base_model.disable_adapter_layers()
    switch(model, disabled=True)
    try:
        yield
    finally:
        if were_enabled:
            model.base_model.enable_adapter_layers()
        switch(model, disabled=was_disabled)


def _layers_of(model: nn.Module) -> Iterator[Any]:
    """Return the parts of a model that run with adapters or without."""
    return (part for part in model.modules() if hasattr(type(part), "disable_adapters") and is_known(part))


def _set_adapter(model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """Replace ``PeftModel.set_adapter``."""
    if not is_known(model):
        original_of(_set_adapter)(model, adapter_name, *args, **kwargs)
        return
    if adapter_name not in model.peft_config:
        raise ValueError(f"Adapter {adapter_name} not found.")
    switch(model, active=(adapter_name,))
    if model.peft_config[adapter_name].is_prompt_learning:
        _set_layers(model, adapter_name, *args, **kwargs)
    else:
        model.base_model.set_adapter(adapter_name, *args, **kwargs)


def _set_adapter_of_tuner(own: Any, tuner: Any, adapter_name: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``BaseTuner.set_adapter``."""
    if not is_known(tuner):
        own(tuner, adapter_name, *args, **kwargs)
        return
    switch(tuner, active=_names(adapter_name))
    _set_layers(tuner, adapter_name, *args, **kwargs)


def _set_layers(model: nn.Module, names: Any, *args: Any, **kwargs: Any) -> None:
    """Set the adapters of all layers, and of modules that are trained beside them where they have one of those."""
    for layer in _layers_of(model):
        chosen = names
        if (adapters := vars(layer).get("_adapters")) is not None:
            found = layer.check_set_adapter(names)
            chosen = found if found in adapters else []
        layer.set_adapter(chosen, *args, **kwargs)


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _active_adapter_of_model(model: Any) -> Any:
    """Replace the attribute of that name, which is then that of the task."""
    try:
        own = vars(model)["active_adapter"]
    except KeyError:
        raise AttributeError(f"{type(model).__name__!r} object has no attribute 'active_adapter'") from None
    active = switch_of(model).active
    if active is None:
        return own
    return active[0] if len(active) == 1 else list(active)


def _set_active_adapter_of_model(model: Any, value: Any) -> None:
    vars(model)["active_adapter"] = value


def _adapters_disabled(model: Any) -> bool:
    """Replace the attribute of that name, which is then that of the task."""
    disabled = switch_of(model).disabled
    return bool(vars(model)["_adapters_disabled"]) if disabled is None else disabled


def _set_adapters_disabled(model: Any, value: bool) -> None:
    vars(model)["_adapters_disabled"] = value


def _forward_of_model(own: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``PeftModel.forward``: without adapters, prompts are none."""
    if model._is_prompt_learning and switch_of(model).disabled:
        return model.base_model.forward(*args, **kwargs)
    return own(model, *args, **kwargs)


@contextmanager
def _enable_peft_forward_hooks(own: Any, tuner: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Replace the method of tuners that gives layers the adapter of each row, by hooks that would be on one rank."""
    names, layers = kwargs.get("adapter_names"), getattr(tuner, "tuner_layer_cls", None)
    if tuner in _pipelined and kwargs.get("alora_offsets") is not None:
        raise FrameError("alora_offsets would reach the layers of one rank only: activated LoRA cannot be divided")
    if not is_known(tuner) or names is None or layers is None:
        with own(tuner, *args, **kwargs):
            yield
        return
    with _nothing_registered(), own(tuner, *args, **kwargs):
        pass  # it checks them
    from peft.tuners.lora.model import _get_encoder
    from peft.utils.other import AuxiliaryTrainingWrapper

    beams = kwargs.get("num_beams")
    repeated = [name for name in names for _ in range(beams)] if isinstance(beams, int) and beams > 1 else names
    encoder = _get_encoder(tuner.model)
    of_encoder = set() if encoder is None else set(encoder.modules())
    parts = [part for part in _layers_of(tuner) if isinstance(part, (layers, AuxiliaryTrainingWrapper))]
    for part in parts:
        switch(part, rows=tuple(names if part in of_encoder else repeated))
    try:
        yield
    finally:
        for part in parts:
            switch(part, rows=None)


@contextmanager
def _nothing_registered() -> Iterator[None]:
    """Run a block in which hooks of modules are not registered."""

    class _Handle:
        def remove(self) -> None:
            pass

    def register(module: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
        return _Handle()

    with replaced(nn.Module, {"register_forward_pre_hook": register}):
        yield


# --- layers


def _set_adapter_of_layer(own: Any, layer: Any, adapter_names: Any, inference_mode: bool = False) -> None:
    """Replace ``set_adapter`` of layers."""
    if not is_known(layer):
        own(layer, adapter_names, inference_mode=inference_mode)
        return
    names = _names(adapter_names)
    if (adapters := vars(layer).get("_adapters")) is not None:  # of a module that is trained beside adapters
        if unknown := [name for name in names if name not in adapters]:
            raise ValueError(f"Adapter {unknown[0]} not found in {adapters}")
        if len(names) > 1:
            raise ValueError(f"Attempted to set multiple ({list(names)}) adapters at once for {type(layer).__name__}.")
        if (inner := getattr(layer, "token_adapter", None)) is not None:
            inner.set_adapter(adapter_names, inference_mode=inference_mode)
    switch(layer, active=names, frozen=inference_mode)


def _enable_adapters_of_layer(own: Any, layer: Any, enabled: bool) -> None:
    """Replace ``enable_adapters`` of layers."""
    if not is_known(layer):
        own(layer, enabled)
        return
    switch(layer, disabled=not enabled)
    if (inner := layer._modules.get("token_adapter")) is not None:
        inner.enable_adapters(enabled)


def _forward_of_layer(own: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the forward of layers."""
    switched = switch_of(layer)
    check_trained(layer, switched)
    if switched.rows is not None and "adapter_names" not in kwargs:
        kwargs["adapter_names"] = list(switched.rows)
    return own(layer, *args, **kwargs)


def _disable_adapters(layer: Any) -> bool:
    disabled = switch_of(layer).disabled
    return bool(layer._disable_adapters) if disabled is None else disabled


def _active_adapter(layer: Any) -> Any:
    active = switch_of(layer).active
    return layer._active_adapter if active is None else list(active)


def _active_adapters(layer: Any) -> list[str]:
    active = _active_adapter(layer)
    return [active] if isinstance(active, str) else active


_OF_PEFT_MODELS = {
    "disable_adapter": _disable_adapter,
    "set_adapter": _set_adapter,
    "_adapters_disabled": _Replaced(_adapters_disabled, _set_adapters_disabled),
}
_OF_MODELS = {"active_adapter": _Replaced(_active_adapter_of_model, _set_active_adapter_of_model)}
_OF_LAYERS = {"disable_adapters": _Replaced(_disable_adapters), "active_adapter": _Replaced(_active_adapter)}
_OF_WRAPPERS = {
    "disable_adapters": _Replaced(_disable_adapters),
    "active_adapter": _Replaced(_active_adapter),
    "active_adapters": _Replaced(_active_adapters),
}
_METHODS_OF_LAYERS: Mapping[str, Callable[..., Any]] = {
    "set_adapter": _set_adapter_of_layer,
    "enable_adapters": _enable_adapters_of_layer,
    "forward": _forward_of_layer,
}
