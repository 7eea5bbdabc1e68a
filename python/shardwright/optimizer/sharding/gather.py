"""Gathers updated parameters from their owners."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.data_parallel.collectives import CHUNK_BYTES, WINDOW_BYTES, Collectives
from shardwright.data_parallel.shards import Slice

_Pieces = list[tuple[nn.Parameter, Slice]]


@torch.no_grad()
def gather_parameters(collectives: Collectives, updated: Iterable[tuple[nn.Parameter, Sequence[Slice]]]) -> None:
    """Give every rank of a group the values of parameters that their owners have updated.

    All ranks of the group must call this with the same parameters. Values are received next to the parameters and
    copied into them afterwards: a gather that is interrupted leaves whole elements.

    Args:
        collectives: Those of the group.
        updated: The parameters, with their slices, in the same order on all ranks.
    """
    collectives.begin_between_steps()
    under_way: deque[tuple[int, _Pieces, torch.Tensor, Any]] = deque()
    number_of_bytes = 0
    for owner, pieces in _chunks(updated):
        if owner == collectives.own_rank:
            flat = torch.cat([piece.of(parameter) for parameter, piece in pieces])
        else:
            numel = sum(piece.stop - piece.start for _, piece in pieces)
            flat = torch.empty(numel, dtype=pieces[0][0].dtype, device=pieces[0][0].device)
        under_way.append((owner, pieces, flat, collectives.start_broadcast(flat, owner)))
        number_of_bytes += flat.nbytes
        while number_of_bytes > WINDOW_BYTES:
            number_of_bytes -= _finish(collectives, *under_way.popleft())
    while under_way:
        _finish(collectives, *under_way.popleft())
    collectives.finish()
    collectives.forget_works()


def _finish(collectives: Collectives, owner: int, pieces: _Pieces, flat: torch.Tensor, work: Any) -> int:
    """Wait for a message, take its values over, and return its size in bytes."""
    collectives.wait(work)
    if owner != collectives.own_rank:
        parts = torch.split(flat, [piece.stop - piece.start for _, piece in pieces])
        for (parameter, piece), part in zip(pieces, parts, strict=True):
            if part.numel() == parameter.numel():
                parameter.copy_(part.view(parameter.shape))
            else:
                piece.of(parameter).copy_(part)
    return flat.nbytes


def _chunks(updated: Iterable[tuple[nn.Parameter, Sequence[Slice]]]) -> Iterator[tuple[int, _Pieces]]:
    """Yield an owner and slices of one dtype on one device, which make one message."""
    lists: list[tuple[int, _Pieces]] = []
    open_lists: dict[tuple[int, torch.dtype, torch.device], _Pieces] = {}
    filled: dict[tuple[int, torch.dtype, torch.device], int] = {}
    for parameter, slices in updated:
        for piece in slices:
            kind = (piece.owner, parameter.dtype, parameter.device)
            size = (piece.stop - piece.start) * parameter.element_size()
            if kind not in open_lists or filled[kind] + size > CHUNK_BYTES:
                open_lists[kind] = []
                filled[kind] = 0
                lists.append((piece.owner, open_lists[kind]))
            open_lists[kind].append((parameter, piece))
            filled[kind] += size
    yield from lists
