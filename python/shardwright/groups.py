"""What stands for parameters in the groups of an optimizer while it updates, and what is put back afterwards.

Whatever a step, or a hook around it, changes besides weights has to be there afterwards, as in one process: options of
groups stay in the groups themselves, gradients go back to the parameters, and state moves with what it belongs to. A
change of which parameters the groups hold cannot be carried over, and is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_hooks

from shardwright.errors import ConfigError

StandIns = Callable[[torch.Tensor], Sequence[torch.Tensor]]


@contextlib.contextmanager
def standing_in(optimizer: Optimizer, stand_ins: StandIns) -> Iterator[None]:
    """Let the groups hold others in the places of their parameters, inside the block.

    The groups stay the same objects, so that what is written to their options stays.

    Args:
        optimizer: The optimizer.
        stand_ins: Returns what stands for a parameter: itself, nothing, another or several.

    Raises:
        ConfigError: Which parameters the groups hold was changed in the block.
    """
    groups = list(optimizer.param_groups)
    before = [(group["params"], group.get("param_names")) for group in groups]
    held: list[list[torch.Tensor]] = []
    try:
        for group, (parameters, names) in zip(groups, before, strict=True):
            each = [stand_ins(one) for one in parameters]
            held.append([one for of_parameter in each for one in of_parameter])
            group["params"] = list(held[-1])
            if names is not None:
                group["param_names"] = [name for name, several in zip(names, each, strict=True) for _ in several]
        yield
        _check(optimizer, groups, held)
        groups = optimizer.param_groups  # a load has others
    finally:
        for group, (parameters, names) in zip(groups, before, strict=True):
            group["params"] = parameters
            if names is not None:
                group["param_names"] = names


@contextlib.contextmanager
def standing_one_for_one(optimizer: Optimizer, tensors: Mapping[int, torch.Tensor], back: Mapping[int, Any]) -> Any:
    """Let others take the places of parameters in the groups, and in the state, inside the block.

    Args:
        optimizer: The optimizer.
        tensors: What stands for a parameter, by its ``id``; others stay.
        back: The parameters, by the ``id`` of what stands for them.

    Raises:
        ConfigError: Which parameters the groups hold was changed in the block.
    """
    with standing_in(optimizer, lambda one: (tensors.get(id(one), one),)):
        try:
            _move_state(optimizer, tensors)
            yield
        finally:
            _move_state(optimizer, back)


def put_back_gradient(
    parameter: torch.Tensor,
    given: torch.Tensor | None,
    left: torch.Tensor | None,
    write: Callable[[torch.Tensor], None],
) -> None:
    """Give a parameter the gradient that a step has left to what stood for it.

    Args:
        parameter: The parameter.
        given: What the stand-in was given: a view of the parameter's gradient, or None.
        left: What it has now.
        write: Writes another one than ``given`` to the parameter.
    """
    if left is given:
        return  # what was changed in place has changed the parameter's
    if left is None:
        parameter.grad = None
    else:
        write(left.detach())


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether a script's hooks are called around an optimizer's step, which may change anything."""
    own = (getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post"))
    every: list[Mapping[int, Any]] = [
        *own,
        torch_hooks._global_optimizer_pre_hooks,
        torch_hooks._global_optimizer_post_hooks,
    ]
    return any(not _is_ours(hook) for hooks in every for hook in hooks.values())


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("shardwright.")


def _check(optimizer: Optimizer, groups: Sequence[Any], held: Sequence[Sequence[torch.Tensor]]) -> None:
    now = optimizer.param_groups
    is_same = len(now) == len(groups) and all(
        len(one["params"]) == len(parameters)
        and all(own is other for own, other in zip(one["params"], parameters, strict=True))
        for one, parameters in zip(now, held, strict=True)
    )
    if not is_same:
        optimizer.param_groups = list(groups)
        raise ConfigError(
            f"{type(optimizer).__name__}.step, or a hook of it, changed which parameters its groups hold, while ranks "
            "update parts of them: add and remove groups and parameters outside of step()"
        )


def _move_state(optimizer: Optimizer, tensors: Mapping[int, Any]) -> None:
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    for key, entry in entries:
        optimizer.state[tensors.get(id(key), key)] = entry
