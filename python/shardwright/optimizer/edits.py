"""Groups that a script has edited after the model was divided: which parameters of the whole model they have now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.errors import ConfigError
from shardwright.job.ranks import PP_GROUP
from shardwright.model.gather import gather_over
from shardwright.model.sentinel import is_sentinel
from shardwright.optimizer.layout import GroupLayout, numbers_of

#: For each group, the numbers in the whole model of one rank's parameters, in order.
Places = list[list[int]]


def places_now(layout: Sequence[GroupLayout], groups: Sequence[Mapping[str, Any]]) -> Places:
    """Return where this rank's parameters are now, by their numbers in the layout.

    Args:
        layout: The groups of the whole model, as they were.
        groups: The optimizer's ``param_groups``, with this rank's parameters. Sentinels that a script has moved are
            passed over: their owners tell.

    Raises:
        ConfigError: A group was added or removed without `add_param_group`, or has a parameter that no group had.
    """
    if len(groups) != len(layout):
        raise ConfigError(
            f"the optimizer has {len(groups)} param_groups, and had {len(layout)} when the model was divided; allowed: "
            "groups that are added by add_param_group"
        )
    numbers = {id(parameter): number for number, parameter in numbers_of(layout)}
    found: Places = []
    for place, group in enumerate(groups):
        here = [one for one in group["params"] if not is_sentinel(one)]
        for one in here:
            if id(one) not in numbers:
                raise ConfigError(
                    f"param_groups[{place}] has a parameter of shape {list(one.shape)} that no group had when the "
                    "model was divided, so that other ranks do not know of it; allowed: parameters that are added by "
                    "add_param_group"
                )
        found.append([numbers[id(one)] for one in here])
    return found


def places_of(layout: Sequence[GroupLayout]) -> Places:
    """Return where this rank's parameters are in a layout."""
    numbers = iter(numbers_of(layout))
    return [[next(numbers)[0] for _ in group.local()] for group in layout]


def edited(layout: Sequence[GroupLayout], ranks: Sequence[tuple[Places, Places]]) -> list[GroupLayout]:
    """Return the layout after the edits of all ranks of a pipeline.

    What stays in its group keeps its place there, but for an order that its rank has changed. What was moved into a
    group follows, as `list.append` would have put it: ordered by its number where ranks do not say another order.

    Args:
        layout: The groups as they were.
        ranks: For each rank of the pipeline, where its parameters were and where they are now.
    """
    flat = [(one, name) for group in layout for one, name in zip(group.parameters, _names(group), strict=True)]
    firsts = [sum(len(group.parameters) for group in layout[:place]) for place in range(len(layout))]
    result = []
    for place, group in enumerate(layout):
        own = range(firsts[place], firsts[place] + len(group.parameters))
        holders: dict[int, Iterator[int]] = {}
        moved: list[list[int]] = []
        for _, now in ranks:
            # A parameter that several ranks have is told by the first of them.
            stays = [number for number in now[place] if number in own and number not in holders]
            order = iter(stays)
            holders |= dict.fromkeys(stays, order)
            moved.append([number for number in now[place] if number not in own])
        known = {number for had, _ in ranks for numbers in had for number in numbers}
        stay = [number for number in own if number in holders or number not in known]
        numbers = [next(holders[number]) if number in holders else number for number in stay]
        numbers += _in_order(moved)
        names = None if group.names is None else tuple(str(flat[number][1]) for number in numbers)
        result.append(GroupLayout(tuple(flat[number][0] for number in numbers), names))
    return result


def _names(group: GroupLayout) -> Sequence[str | None]:
    return group.names if group.names is not None else [None] * len(group.parameters)


def _in_order(moved: Sequence[Sequence[int]]) -> list[int]:
    """Merge what ranks have moved into a group, each number once."""
    listed = list(dict.fromkeys(number for numbers in moved for number in numbers))
    return sorted(listed) if all(list(numbers) == sorted(numbers) for numbers in moved) else listed


class EditedGroups:
    """The part of a distributed optimizer that knows which parameters of the whole model its groups have."""

    param_groups: list[dict[str, Any]]
    _layout: list[GroupLayout] | None = None

    def agree_on_groups(self, operation: str) -> None:
        """Tell the ranks of the pipeline, which must all call this, how groups were edited here.

        Raises:
            ConfigError: On all of them, if one has edited what the others cannot know.
        """
        if self._layout is None:
            return
        try:
            own: tuple[Places, Places, str | None] = (*self._places(self._layout), None)
        except ConfigError as error:
            own = ([], [], str(error))
        told = gather_over(PP_GROUP, own, operation)
        for rank, (*_, failed) in enumerate(told):
            if failed is not None:
                raise ConfigError(f"{operation}: {failed} (pp_rank {rank})")
        if any(had != now for had, now, _ in told):
            self._layout = edited(self._layout, [(had, now) for had, now, _ in told])
            for group, whole in zip(self.param_groups, self._layout, strict=True):
                whole.keep_local(group)

    def check_known(self, operation: str) -> None:
        """Refuse groups that were edited here since the ranks of the pipeline have last agreed on them.

        Raises:
            ConfigError: They were.
        """
        if self._layout is None:
            return
        had, now = self._places(self._layout)
        if had != now:
            raise ConfigError(
                f"{operation}: param_groups were edited on this rank after the model was divided, which other ranks do "
                "not know; they learn it by the optimizer's state_dict(), which all ranks of the pipeline call, or by "
                "a checkpoint"
            )

    def _places(self, layout: Sequence[GroupLayout]) -> tuple[Places, Places]:
        """Where this rank's parameters were, and where they are."""
        return places_of(layout), places_now(layout, self.param_groups)

    def _groups(self) -> list[GroupLayout]:
        return [GroupLayout.of(group) for group in self.param_groups] if self._layout is None else self._layout
