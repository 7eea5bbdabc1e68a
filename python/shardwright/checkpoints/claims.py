"""What a checkpoint says besides the tensors of its model, looked at before anything of it is taken over.

The manifest's hash shows that it is as it was written, and not who wrote it: what it says may be anything.
"""

from __future__ import annotations

import collections
import inspect
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.checkpoints.tensors import MASTERS, MODEL
from shardwright.errors import ShardwrightError
from shardwright.optimizer import DistributedOptimizer
from shardwright.optimizer.half_precision import HalfPrecision
from shardwright.optimizer.sharding.elementwise import is_elementwise, original_class
from shardwright.safe_repr import safe_repr

#: The dtype and the shape of a saved tensor, by name.
Kinds = Mapping[str, tuple[str, tuple[int, ...]]]

_MAX_SHOWN = 100
#: How a step computes says nothing of its options, and may need a device.
UNFUSED: dict[str, Any] = {"fused": None, "foreach": False, "capturable": False}


def wrong(place: str, found: object, allowed: str) -> ShardwrightError:
    """Return the error that something in a manifest is not what it may be.

    Args:
        place: Where in ``user_content`` it is, or the tensor.
        found: What is there.
        allowed: What may be there.
    """
    shown = safe_repr(found)
    shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."
    return ShardwrightError(f"manifest.json: {place} is {shown}; allowed: {allowed}. Nothing was loaded")


def check_form(content: Mapping[str, Any]) -> None:
    """Refuse what the library's own part of the user content cannot be.

    Raises:
        ShardwrightError: Something has another form than what is saved; names it.
    """
    _names_of_values(content["extra_states"], "user_content.extra_states")
    placement, steps = content["placement"], content.get("random_steps", [0, 0])
    is_placement = _is_list(placement, 2) and isinstance(placement[0], str) and _is_count(placement[1])
    if placement is not None and not is_placement:
        raise wrong("user_content.placement", placement, "null, or a strategy and a number of ranks")
    if not _is_list(steps, 2) or not all(map(_is_count, steps)):
        raise wrong("user_content.random_steps", steps, "two numbers of steps")
    equal = content.get("equal", [])
    if not isinstance(equal, list) or not all(map(_is_names, equal)):
        raise wrong("user_content.equal", equal, "lists of names of tensors")
    saved = content["optimizer"]
    if saved is None:
        return
    keys = {"kind", "options", "loss_scaler", "groups", "values"}
    if not isinstance(saved, dict) or saved.keys() != keys:
        found = sorted(saved) if isinstance(saved, dict) else saved
        raise wrong("user_content.optimizer", found, f"null, or an object with {', '.join(sorted(keys))}")
    if not isinstance(saved["kind"], str | None):
        raise wrong("user_content.optimizer.kind", saved["kind"], "null, or the name of a class")
    if not isinstance(saved["groups"], list) or not all(map(_is_names, saved["groups"])):
        raise wrong("user_content.optimizer.groups", saved["groups"], "lists of names of parameters")
    for name, times in collections.Counter(name for names in saved["groups"] for name in names).items():
        if times > 1:
            raise wrong(f"parameter {name!r} of user_content.optimizer.groups", f"{times} times there", "once")
    _names_of_values(saved["values"], "user_content.optimizer.values")
    for name, values in saved["values"].items():
        _names_of_values(values, f"user_content.optimizer.values[{name!r}]")


def check_optimizer(
    optimizer: DistributedOptimizer, decoded: Mapping[str, Any], kinds: Kinds, groups: Sequence[Sequence[str]]
) -> None:
    """Refuse options that an optimizer cannot go on with; `check_state` looks at its state.

    Args:
        optimizer: The optimizer, which is as it was afterwards.
        decoded: The saved ``options``, ``loss_scaler`` and ``values``, decoded.
        kinds: The saved tensors.
        groups: The names of the saved parameters of each group.

    Raises:
        ShardwrightError: Something is not what this optimizer has; names it, what was found, and what is allowed.
    """
    kind = original_class(optimizer)
    options = decoded["options"]
    defaults = _defaults_of(kind)
    place = "user_content.optimizer.options"
    if not isinstance(options, list) or len(options) != len(groups) or not all(map(_is_options, options)):
        raise wrong(place, options, f"{len(groups)} dicts of options, as many as groups, without their parameters")
    if len(options) == len(optimizer.param_groups):
        for number, (saved, own) in enumerate(zip(options, optimizer.param_groups, strict=True)):
            _check_options(f"{place}[{number}]", saved, own, defaults, is_elementwise(kind))
    _check_masters(kinds)
    if is_elementwise(kind):
        for number, saved in enumerate(options):
            _check_values(f"{place}[{number}]", kind, saved, defaults, optimizer.param_groups)
    scaler = decoded["loss_scaler"]
    if isinstance(optimizer, HalfPrecision) and scaler is not None:
        now = optimizer.loss_scaler.state_dict()
        try:
            optimizer.loss_scaler.load_state_dict(scaler)
        except Exception as error:
            allowed = f"what it has itself, {safe_repr(now)} ({type(error).__name__}: {error})"
            raise wrong("user_content.optimizer.loss_scaler", scaler, allowed) from error
        finally:
            optimizer.loss_scaler.load_state_dict(now)


def _check_options(
    place: str, saved: Mapping[str, Any], own: Mapping[str, Any], defaults: Mapping[str, Any], is_known: bool
) -> None:
    """Refuse an option of another type than the optimizer has and than its class begins with.

    One that a known class leaves open is a number.
    """
    for key, value in saved.items():
        known = own.get(key)
        if is_known and key in own and known is None and not isinstance(value, bool | None) and not is_number(value):
            raise wrong(f"{place}[{key!r}]", value, "null, a bool or a number")
        if not _is_like(value, known) and not (key in defaults and _is_like(value, defaults[key])):
            raise wrong(f"{place}[{key!r}]", value, _kind_of(known))


def _is_like(value: object, known: object) -> bool:
    """Whether a value may stand where a known one does, as far as bools, numbers and lists of them tell."""
    if isinstance(known, bool):
        return isinstance(value, bool | None)
    if is_number(known):
        return is_number(value)
    if isinstance(known, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(known):
            return False
        return all(map(_is_item_like, value, known))
    return True


def _is_item_like(value: object, known: object) -> bool:
    """The same for an item. One that is left open, as the first of Adafactor's ``eps`` is, is a number or null."""
    return value is None or is_number(value) if known is None else _is_like(value, known)


def _kind_of(known: object) -> str:
    """Say what `_is_like` takes."""
    if isinstance(known, tuple | list):
        return f"{len(known)} numbers" if all(map(is_number, known)) else f"values like {safe_repr(known)}"
    return "a bool" if isinstance(known, bool) else "a number"


def _defaults_of(kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """The options with which a class begins, where its signature tells; a script may have begun with others."""
    try:
        known = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {each.name: each.default for each in known if each.default is not each.empty}


def _check_values(
    place: str,
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse an option with which PyTorch does not make an optimizer of this class, unless a group has it already.

    A class checks its defaults, and not what groups have instead: each option is tried by itself, since a group with
    Nesterov momentum of zero trains, and so does one with a value that would not do as a default.
    """
    unfused = {key: value for key, value in UNFUSED.items() if key in defaults}
    make: Any = kind
    for key, value in options.items():
        # Schedules set rates, below zero too.
        if key not in defaults or key in unfused or key == "lr" or isinstance(value, bool | None):
            continue
        if any(not isinstance(group.get(key), torch.Tensor) and group.get(key) == value for group in groups):
            continue
        try:
            make([torch.nn.Parameter(torch.zeros(1))], **{**unfused, key: value})
        except ValueError as error:
            raise wrong(
                f"{place}[{key!r}]",
                value,
                f"what {kind.__name__} takes ({error}), or what a group of this optimizer has",
            ) from error
        except Exception:
            continue  # what cannot be tried here, such as a kernel for a device, is the step's to say


def _check_masters(kinds: Kinds) -> None:
    for name, kind in kinds.items():
        if name.startswith(MASTERS) and (of := kinds.get(MODEL + name.removeprefix(MASTERS))) is not None:
            expected = ("float32", of[1])
            if kind != expected:
                raise wrong(f"tensor {name!r}", shown_kind(kind), f"{shown_kind(expected)}, as of its parameter")


def _names_of_values(found: object, place: str) -> None:
    if not isinstance(found, dict):
        raise wrong(place, found, "an object")


def shown_kind(kind: tuple[str, tuple[int, ...]]) -> str:
    """Return the dtype and the shape of a tensor as errors show them."""
    return f"{kind[0]} {list(kind[1])}"


def _is_list(value: object, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_options(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value) and "params" not in value


def is_number(value: object) -> bool:
    """Return whether a value is a single real number, or a tensor with one."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex() and value.dtype is not torch.bool
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
