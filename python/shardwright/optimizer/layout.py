"""Parameter groups of the whole model, of which each rank holds a part."""

from __future__ import annotations

import itertools
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

    def local(self) -> list[int]:
        """The places of this rank's parameters."""
        return [index for index, parameter in enumerate(self.parameters) if not is_sentinel(parameter)]

    def keep_local(self, group: dict[str, Any]) -> None:
        """Leave only this rank's parameters in `group`; the lists stay the same objects."""
        local = self.local()
        group["params"][:] = [self.parameters[index] for index in local]
        if self.names is not None:
            group["param_names"][:] = [self.names[index] for index in local]


def numbers_of(
    layout: Sequence[GroupLayout], places: Sequence[Sequence[int]] | None = None
) -> list[tuple[int, torch.Tensor]]:
    """Return local parameters, in order, each with its number in the whole model.

    Args:
        layout: The groups of the whole model.
        places: The places in each group of the parameters that are meant; by default of all local ones.
    """
    places = [group.local() for group in layout] if places is None else places
    firsts = itertools.accumulate((len(group.parameters) for group in layout), initial=0)
    return [
        (first + place, group.parameters[place])
        for first, group, local in zip(firsts, layout, places, strict=False)
        for place in local
    ]


def to_global(
    local: Mapping[str, Any], layout: Sequence[GroupLayout], places: Sequence[Sequence[int]] | None = None
) -> dict[str, Any]:
    """Convert a local optimizer's state dict to the numbering of the whole model; see `numbers_of` for ``places``."""
    numbers = [number for number, _ in numbers_of(layout, places)]
    state = {numbers[key] if isinstance(key, int) else key: value for key, value in local["state"].items()}
    groups = _numbered(local["param_groups"], [len(whole.parameters) for whole in layout])
    for group, whole in zip(groups, layout, strict=True):
        if whole.names is not None:
            group["param_names"] = list(whole.names)
    return {**local, "state": state, "param_groups": groups}


def _numbered(groups: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The groups with parameters of so many each, numbered through."""
    numbers = itertools.count()
    return [
        {**group, "params": list(itertools.islice(numbers, size))} for group, size in zip(groups, sizes, strict=True)
    ]


def to_local(
    whole: Mapping[str, Any], layout: Sequence[GroupLayout], places: Sequence[Sequence[int]] | None = None
) -> dict[str, Any]:
    """Select this rank's part of a whole state dict, numbered for the local optimizer; see `numbers_of` for ``places``.

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
    numbers = {saved[number]: place for place, (number, _) in enumerate(numbers_of(layout, places))}
    known = set(saved)
    state = {
        numbers.get(key, key): value for key, value in whole["state"].items() if key in numbers or key not in known
    }
    places = [own.local() for own in layout] if places is None else places
    local_groups = _numbered(groups, [len(local) for local in places])
    for group, local in zip(local_groups, places, strict=True):
        if "param_names" in group:
            group["param_names"] = [group["param_names"][index] for index in local]
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
