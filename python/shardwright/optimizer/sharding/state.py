"""State dicts of optimizers whose state is sharded: parts that name their place, and how they are merged."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from shardwright.job.runtime import Runtime
from shardwright.optimizer.layout import PARTIAL_KEY, GroupLayout, merged, numbers_of
from shardwright.optimizer.sharding.share import Share

#: In a partial state dict: what makes it a share.
SHARE_KEY = "_smp_share"


class _Place(NamedTuple):
    """Where a share was saved.

    Attributes:
        pp_rank: The rank in the pipeline.
        pp_size: How many there were.
        dp_rank: The rank among those with the same stage.
        dp_size: How many there were.
        tp_rank: The rank in TP_GROUP.
        tp_size: How many there were.
    """

    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int


def is_share(state_dict: Any) -> bool:
    """Whether this is what a rank saved of a sharded optimizer, or a list of it."""
    if isinstance(state_dict, (list, tuple)):
        return len(state_dict) > 0 and all(map(is_share, state_dict))
    return isinstance(state_dict, Mapping) and SHARE_KEY in state_dict


def copied(part: Any) -> Any:
    """Return a copy on the CPU, of one time: gathered with those of other ranks, it must not change with the state."""
    return tree_map(lambda item: item.detach().cpu().clone() if isinstance(item, torch.Tensor) else item, part)


def shares_in(value: Any) -> list[Mapping[str, Any]]:
    """Return the shares in nested lists."""
    if isinstance(value, (list, tuple)):
        return [share for each in value for share in shares_in(each)]
    return [value]


def to_share(
    part: dict[str, Any], runtime: Runtime, share: Share, layout: Sequence[GroupLayout], places: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Say in a partial state dict, numbered as in the whole model, which elements it has.

    Args:
        part: The state dict.
        runtime: The rank.
        share: Its share.
        layout: The groups of the whole model.
        places: The places in each group of what this rank updates.
    """
    place = runtime.place
    slices = {
        number: (own.start, own.stop, tuple(parameter.shape))
        for number, parameter in numbers_of(layout, places)
        if (own := share.own(parameter)) is not None
    }
    over_dp = [number for number, parameter in numbers_of(layout) if share.is_over_dp(parameter)]
    where = _Place(
        place.pp_rank,
        place.pp_size,
        place.dp_ranks.index(place.rank),
        len(place.dp_ranks),
        place.tp_ranks.index(place.rank),
        len(place.tp_ranks),
    )
    return {**part, PARTIAL_KEY: True, SHARE_KEY: {"place": tuple(where), "slices": slices, "over_dp": over_dp}}


def merged_shares(shares: Iterable[Mapping[str, Any]], tp_rank: int, tp_size: int) -> dict[str, Any]:
    """Merge shares into a whole state dict.

    Args:
        shares: Those of all ranks that saved them. Several of the same place count once.
        tp_rank: This rank's in TP_GROUP, whose parts of divided parameters are wanted.
        tp_size: How many ranks TP_GROUP has.

    Returns:
        A dict in the form of ``torch.optim.Optimizer.state_dict()``.

    Raises:
        ValueError: Shares are missing.
    """
    by_place = {_Place(*share[SHARE_KEY]["place"]): share for share in shares}
    _check_complete(list(by_place))
    whole: list[dict[str, Any]] = []
    cut: dict[int, list[tuple[int, int, tuple[int, ...], dict[str, Any]]]] = {}
    for place, share in sorted(by_place.items(), key=lambda each: each[0]):
        numbers = _numbers(share, place, by_place, tp_rank % place.tp_size)
        state = {
            numbers.get(key, key): value
            for key, value in share["state"].items()
            if key in numbers or not isinstance(key, int)
        }
        for number, (start, stop, shape) in share[SHARE_KEY]["slices"].items():
            if numbers.get(number) in state:
                cut.setdefault(numbers[number], []).append((start, stop, tuple(shape), state.pop(numbers[number])))
        rest = {key: value for key, value in share.items() if key != SHARE_KEY}
        whole.append({**rest, "state": state})
        if place.tp_rank == tp_rank % place.tp_size and len(whole) > 1:
            whole[0] = {**rest, "state": whole[0]["state"]}  # its groups have this tp rank's parameters
        if place.tp_size != tp_size and set(numbers.values()) - set(share[SHARE_KEY]["over_dp"]):
            raise ValueError(
                f"the shares of an optimizer's state were saved with tensor_parallel_degree {place.tp_size}, and have "
                f"parts of parameters that are divided over tp ranks; they cannot be loaded with degree {tp_size}"
            )
    whole.append({**whole[0], "state": {number: _joined(number, parts) for number, parts in cut.items()}})
    return merged(whole)


def _numbers(
    share: Mapping[str, Any], place: _Place, by_place: Mapping[_Place, Mapping[str, Any]], tp_rank: int
) -> dict[int, int]:
    """The numbers that a tp rank gives to the parameters of a share which it holds as well."""
    own = [number for number in share["state"] if isinstance(number, int)]
    if place.tp_rank == tp_rank:
        return {number: number for number in own}
    # A tp rank may lack parameters that another has, such as a bias.
    (counterpart,) = itertools.islice(
        (one for at, one in by_place.items() if (at.pp_rank, at.tp_rank) == (place.pp_rank, tp_rank)), 1
    )
    numbers = dict(zip(share[SHARE_KEY]["over_dp"], counterpart[SHARE_KEY]["over_dp"], strict=True))
    return {number: numbers[number] for number in own if number in numbers}


def _check_complete(places: list[_Place]) -> None:
    first = places[0]
    if any((one.pp_size, one.dp_size) != (first.pp_size, first.dp_size) for one in places):
        raise ValueError("the shares of an optimizer's state were saved by jobs of different layouts")
    found = {(one.pp_rank, one.dp_rank) for one in places}
    missing = [
        f"pp_rank {pp_rank}, dp_rank {dp_rank}"
        for pp_rank in range(first.pp_size)
        for dp_rank in range(first.dp_size)
        if (pp_rank, dp_rank) not in found
    ]
    if missing:
        raise ValueError(
            f"of the shares of an optimizer's state, those of {'; '.join(missing)} are missing: every rank has to load "
            "what it saved, or each the list of all shares; optimizer.state_dict() gives a whole state dict"
        )


def _joined(number: int, parts: list[tuple[int, int, tuple[int, ...], dict[str, Any]]]) -> dict[str, Any]:
    """Join the states of the parts of a parameter."""
    parts.sort(key=lambda part: part[0])
    _, stop, shape, _ = parts[-1]
    borders = [0, *(part[1] for part in parts)]
    if any(start != border for (start, *_), border in zip(parts, borders, strict=False)) or stop != _numel(shape):
        raise ValueError(f"the shares of an optimizer's state do not make up that of parameter {number}")

    def is_cut(key: str) -> bool:
        return all(
            isinstance(state.get(key), torch.Tensor) and state[key].shape == (stop - start,)
            for start, stop, _, state in parts
        )

    first = parts[0][3]
    return {
        key: torch.cat([state[key] for *_, state in parts]).view(shape) if is_cut(key) else value
        for key, value in first.items()
    }


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
