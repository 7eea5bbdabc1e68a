"""Parameter groups of the whole model, of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.model.sentinel import is_sentinel

PARTIAL_KEY = "_smp_is_partial"


@dataclass(frozen=True)
class GroupLayout:
    """The parameters of a group on all ranks, in order; those of other ranks are sentinels.

    Attributes:
        parameters: The parameters and sentinels.
        names: Their names, where the group was built from named parameters.
    """

    parameters: tuple[torch.Tensor, ...]
    names: tuple[str, ...] | None

    @staticmethod
    def of(group: Mapping[str, Any]) -> GroupLayout:
        """Create the layout of a group that has all its parameters."""
        names = group.get("param_names")
        return GroupLayout(tuple(group["params"]), None if names is None else tuple(names))

    def keep_local(self, group: dict[str, Any]) -> None:
        """Remove parameters of other ranks from ``group``; the lists remain the same objects."""
        local = [index for index, parameter in enumerate(self.parameters) if not is_sentinel(parameter)]
        group["params"][:] = [self.parameters[index] for index in local]
        if self.names is not None:
            group["param_names"][:] = [self.names[index] for index in local]


def local_numbers(layout: Sequence[GroupLayout]) -> list[int]:
    """Return the number of each local parameter in the whole model, in order."""
    parameters = [parameter for group in layout for parameter in group.parameters]
    return [number for number, parameter in enumerate(parameters) if not is_sentinel(parameter)]


def to_global(local: Mapping[str, Any], layout: Sequence[GroupLayout]) -> dict[str, Any]:
    """Convert a local optimizer's state dict to the numbering of the whole model."""
    numbers = local_numbers(layout)
    state = {numbers[key] if isinstance(key, int) else key: value for key, value in local["state"].items()}
    groups = []
    next_number = 0
    for group, whole in zip(local["param_groups"], layout, strict=True):
        packed = {**group, "params": list(range(next_number, next_number + len(whole.parameters)))}
        if whole.names is not None:
            packed["param_names"] = list(whole.names)
        groups.append(packed)
        next_number += len(whole.parameters)
    return {**local, "state": state, "param_groups": groups}


def to_local(whole: Mapping[str, Any], layout: Sequence[GroupLayout]) -> dict[str, Any]:
    """Select this rank's part of a whole state dict, numbered for the local optimizer.

    Raises:
        ValueError: If the groups are not those of this optimizer, with torch's words for it.
    """
    groups = whole["param_groups"]
    if len(groups) != len(layout):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if any(len(group["params"]) != len(own.parameters) for group, own in zip(groups, layout, strict=True)):
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        )
    # The saved numbers need not count from 0: torch pairs them with parameters by position.
    saved = [number for group in groups for number in group["params"]]
    numbers = {saved[number]: place for place, number in enumerate(local_numbers(layout))}
    known = set(saved)
    state = {
        numbers.get(key, key): value for key, value in whole["state"].items() if key in numbers or key not in known
    }
    local_groups = []
    next_number = 0
    for group, own in zip(groups, layout, strict=True):
        local = [index for index, parameter in enumerate(own.parameters) if not is_sentinel(parameter)]
        packed = {**group, "params": list(range(next_number, next_number + len(local)))}
        if "param_names" in group:
            packed["param_names"] = [group["param_names"][index] for index in local]
        local_groups.append(packed)
        next_number += len(local)
    return {**whole, "state": state, "param_groups": local_groups}


def merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the partial state dicts of all ranks of a pipeline.

    Args:
        parts: What each rank's ``local_state_dict()`` returned.

    Returns:
        A dict in the form of ``torch.optim.Optimizer.state_dict()``.
    """
    parts = list(parts)
    state: dict[Any, Any] = {}
    for part in parts:
        for key, value in part["state"].items():
            state.setdefault(key, value)
    numbered = sorted(key for key in state if isinstance(key, int))
    others = [key for key in state if not isinstance(key, int)]
    first = {key: value for key, value in parts[0].items() if key != PARTIAL_KEY}
    return {**first, "state": {key: state[key] for key in (*numbered, *others)}}
