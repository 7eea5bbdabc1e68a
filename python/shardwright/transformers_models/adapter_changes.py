"""Methods of ``peft`` that add, delete and merge adapters, which every rank calls for a divided model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch import nn

from shardwright.errors import FrameError, NotOwnedError
from shardwright.patches import original_of, replaced
from shardwright.transformers_models.adalora import Gathering
from shardwright.transformers_models.switching import in_step


class Divided(Gathering, Protocol):
    """Where the adapters of a model are, and what was changed of them."""

    def spanning(self, part: nn.Module) -> str | None:
        """Return the name of a part if ranks divide it; None if one rank has all of it."""

    def is_here(self, part: nn.Module) -> bool:
        """Return whether this rank runs a part."""

    def changed(self, parts: list[nn.Module]) -> None:
        """Take over what parts of the model have got, or have not any more."""


#: By models and tuners of ``peft`` that ranks divide: where their parts are.
_divided: weakref.WeakKeyDictionary[nn.Module, Divided] = weakref.WeakKeyDictionary()
#: The models whose adapters a method in progress changes.
_changing: list[nn.Module] = []


def install(parts: Sequence[nn.Module], installed: ExitStack, adapters: Divided) -> None:
    """Let adapters of a model be added, deleted and merged on all ranks, for as long as the job runs.

    Args:
        parts: What ``peft`` made of the model, and its layers.
        installed: What is taken back at the end of the job.
        adapters: Where they are.
    """
    import peft
    from peft.tuners.tuners_utils import BaseTuner

    for part in parts:
        if isinstance(part, (peft.PeftModel, BaseTuner)):
            _divided[part] = adapters
    changes = {name: function for name, function in _CHANGES.items() if hasattr(peft.PeftModel, name)}
    installed.enter_context(replaced(peft.PeftModel, changes))
    installed.enter_context(replaced(BaseTuner, _MERGES))


def _changing_adapters(name: str) -> Callable[..., Any]:
    """Return a replacement of a method that adds or deletes adapters."""

    def change(model: Any, *args: Any, **kwargs: Any) -> Any:
        adapters = _divided.get(model)
        if adapters is None:
            return original_of(change)(model, *args, **kwargs)
        if in_step():
            raise FrameError(f"{name} was called in a step function, on one rank: call it outside of it, on every rank")
        _changing.append(model)
        try:
            return original_of(change)(model, *args, **kwargs)
        finally:
            _changing.pop()
            if model not in _changing:
                adapters.changed(_parts_of(model))

    change.__name__ = name
    return change


def _parts_of(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that ``peft`` has put into a model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        for name, child in module.named_children():
            if isinstance(child, (BaseTunerLayer, AuxiliaryTrainingWrapper)) or name == "prompt_encoder":
                found.append(child)
            else:
                waiting.append(child)
    return found


@contextmanager
def _of_own_layers(tuner: Any, operation: str) -> Iterator[list[Any]]:
    """Run a block that calls a method of all layers, which does nothing for those that other ranks run."""
    adapters = _divided.get(tuner)
    if adapters is None or not adapters.is_divided:
        yield []
        return
    if in_step():
        raise FrameError(f"{operation} was called in a step function, on one rank: call it outside, on every rank")
    layers = _parts_of(tuner)
    if spanning := next((name for layer in layers if (name := adapters.spanning(layer)) is not None), None):
        raise NotOwnedError(
            f"{operation}: the weights of {spanning!r} and of its adapters are on different ranks. Place that module "
            "on one rank by smp.set_partition, or build the model in a process that does not divide it, load what "
            "model.state_dict() gave into it, and merge there"
        )
    others = [layer for layer in layers if not adapters.is_here(layer)]
    for layer in others:
        vars(layer).update(merge=_nothing, unmerge=_nothing)
    try:
        yield others
    finally:
        for layer in others:
            for name in ("merge", "unmerge"):
                vars(layer).pop(name, None)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Leave a layer to the rank that runs it."""


def _merge_adapter(tuner: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``BaseTuner.merge_adapter``."""
    from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge

    with _of_own_layers(tuner, "merge_adapter") as others:
        original_of(_merge_adapter)(tuner, *args, **kwargs)
        names = args[0] if args else kwargs.get("adapter_names")
        for layer in others:
            if isinstance(layer, BaseTunerLayer):
                layer.merged_adapters.extend(check_adapters_to_merge(layer, names))


def _unmerge_adapter(tuner: Any) -> None:
    """Replace ``BaseTuner.unmerge_adapter``."""
    with _of_own_layers(tuner, "unmerge_adapter") as others:
        original_of(_unmerge_adapter)(tuner)
        for layer in others:
            getattr(layer, "merged_adapters", []).clear()


_CHANGES = {name: _changing_adapters(name) for name in ("add_adapter", "load_adapter", "delete_adapter")}
_MERGES = {"merge_adapter": _merge_adapter, "unmerge_adapter": _unmerge_adapter}
