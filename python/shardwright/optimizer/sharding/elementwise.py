"""Optimizers that update each element of a parameter by itself, so that ranks may have parts of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.groups import has_step_hooks

#: How many tensors of a parameter's size the state has, by the options of a group.
_STATE_TENSORS: dict[type[Optimizer], Callable[[Mapping[str, Any]], int]] = {
    torch.optim.SGD: lambda group: int(group["momentum"] != 0),
    torch.optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.AdamW: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.RMSprop: lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]),
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.Adamax: lambda group: 2,
    torch.optim.NAdam: lambda group: 2,
    torch.optim.RAdam: lambda group: 2,
    torch.optim.ASGD: lambda group: 1,
    torch.optim.Rprop: lambda group: 2,
}

#: Their steps when this library was imported. One that a script has put in its place since may do anything.
_STEPS: dict[type[Optimizer], Any] = {}


def step_of(kind: type[Optimizer]) -> Any:
    """Return the function that updates, without the one around it by which PyTorch calls hooks.

    Args:
        kind: The optimizer's class.
    """
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


_STEPS.update((kind, step_of(kind)) for kind in _STATE_TENSORS)


def original_class(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class of an optimizer before ``smp.DistributedOptimizer`` wrapped it.

    Args:
        optimizer: The distributed optimizer.
    """
    original: type[Optimizer] = type(optimizer).__bases__[-1]
    return original


def state_tensors(kind: type[Optimizer], group: Mapping[str, Any]) -> int | None:
    """Return how many tensors of a parameter's size the state has.

    Args:
        kind: The optimizer's class. A subclass of a known one may do anything.
        group: The options of the parameter's group.

    Returns:
        The number; None for an optimizer that is not known to be element-wise.
    """
    found = _STATE_TENSORS.get(kind)
    return None if found is None or not is_elementwise(kind) else found(group)


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer's class is known to update each element by itself.

    This library's own subclasses of such classes only choose their arguments. A class whose ``step`` a script has
    replaced is not known any more.
    """
    known = next((base for base in kind.__mro__ if base in _STATE_TENSORS), None)
    if known is None or step_of(known) is not _STEPS[known]:
        return False
    return kind is known or kind.__module__.startswith("shardwright.")


def keeps_the_rule(kind: type[Optimizer]) -> bool:
    """Return whether a class is derived from one that is known, and overrides nothing by which that updates.

    It may choose arguments, keep state dicts its own way, and have methods of its own, which the known step does not
    call.
    """
    mro = kind.__mro__
    known = next((base for base in mro if base in _STATE_TENSORS), None)
    if known is None or not is_elementwise(known):
        return False
    added = [base for base in mro[: mro.index(known)] if base not in known.__mro__]
    overridden = [name for base in added for name in vars(base) if name != "step" or has_own_step(base)]
    return all(_leaves(name, known) for name in overridden)


def has_own_step(kind: type) -> bool:
    """Return whether a class defines a ``step``, other than the one that PyTorch puts into each to call hooks."""
    own: Any = vars(kind).get("step")
    if own is None:
        return False
    bases = [base for base in kind.__mro__[1:] if isinstance(base, type) and issubclass(base, Optimizer)]
    return not (getattr(own, "hooked", False) and any(own.__wrapped__ is step_of(base) for base in bases))


#: What a subclass may override without an effect on what a step does.
_ARGUMENTS_AND_STATE = frozenset(
    {
        *("__init__", "__repr__", "__getstate__", "__setstate__", "__annotations__", "__doc__", "__module__"),
        *("zero_grad", "add_param_group", "state_dict", "load_state_dict"),
        *("__qualname__", "__dict__", "__weakref__", "__orig_bases__", "__parameters__", "__abstractmethods__"),
        *("__annotate__", "__annotate_func__", "__annotations_cache__", "__static_attributes__", "__firstlineno__"),
        *("__type_params__", "__init_subclass__", "__class_getitem__", "_abc_impl", "__hash__", "__eq__", "__slots__"),
    }
)
#: Attributes of an optimizer that its class does not have, but its step reads.
_READ_BY_STEPS = frozenset({"param_groups", "state", "defaults"})


def _leaves(name: str, known: type[Optimizer]) -> bool:
    if name in _ARGUMENTS_AND_STATE:
        return True
    is_own = not hasattr(known, name) and name not in _READ_BY_STEPS
    return is_own and not (name.startswith("__") and name.endswith("__"))


def changes_without_gradient(optimizer: Optimizer) -> bool:
    """Return whether a step may change parameters that have no gradient; those of PyTorch do not, but hooks may.

    Args:
        optimizer: The distributed optimizer.
    """
    kind = original_class(optimizer)
    return not kind.__module__.startswith("torch.optim.") or has_step_hooks(optimizer)


def calls_hooks_inside(optimizer: Optimizer) -> bool:
    """Return whether a step calls hooks of the script again, by calling the step of a class that has been used itself.

    Args:
        optimizer: The distributed optimizer.
    """
    kind = original_class(optimizer)
    outer = next((base for base in kind.__mro__ if "step" in vars(base)), kind)
    inner: list[Any] = [vars(base)["step"] for base in outer.__mro__[1:] if "step" in vars(base)]
    return has_step_hooks(optimizer) and any(getattr(each, "hooked", False) for each in inner)
