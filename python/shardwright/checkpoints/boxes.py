"""Boxes of tensors: what a rank holds of a named tensor, and views of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwright.tensor_parallel.sharding import Origin, Sharding

Sides = tuple[int, ...]
#: Offset and size of a box, and no run of its elements.
Region = tuple[list[int], list[int], None]


@dataclass(frozen=True)
class Fragment:
    """A box of a tensor on this rank, and the box of a named tensor that it is.

    Attributes:
        name: The named tensor.
        shape: Its whole shape.
        offset: Where the box begins in it.
        first: Where the box begins in the tensor on this rank.
        size: Of the box, in the tensor on this rank.
        transposed: Whether the last two dims are exchanged between the two.
    """

    name: str
    shape: Sides
    offset: Sides
    first: Sides
    size: Sides
    transposed: bool = False


@dataclass(frozen=True)
class Piece:
    """A box of a named tensor, and the memory of this rank that holds it.

    Attributes:
        name: The named tensor.
        shape: Its whole shape.
        offset: Where the box begins in it.
        view: The box's elements, a view of a tensor of this rank.
    """

    name: str
    shape: Sides
    offset: Sides
    view: torch.Tensor

    @property
    def size(self) -> Sides:
        """The size of the box."""
        return tuple(self.view.shape)

    @property
    def region(self) -> Region:
        """What it is of the named tensor, as readers and writers take it."""
        return list(self.offset), list(self.size), None


def whole(name: str, shape: Sequence[int]) -> Fragment:
    """The fragment of a rank that holds all of a tensor."""
    zeros = (0,) * len(shape)
    return Fragment(name, tuple(shape), zeros, zeros, tuple(shape))


def rows(name: str, shape: Sequence[int], first: int, count: int, origins: Sequence[Origin] = ()) -> list[Fragment]:
    """The fragments of a rank that holds some rows of a tensor; ``name`` and ``origins`` as for :func:`divided`."""
    zeros = (0,) * (len(shape) - 1)
    offset, size = (first, *zeros), (count, *shape[1:])
    if not origins:
        return [Fragment(name, tuple(shape), offset, (0, *zeros), size)]
    return [fragment for origin in origins for fragment in _of_origin(name, origin, ((0, *zeros), offset, size))]


def divided(
    name: str, shape: Sequence[int], sharding: Sharding, rank: int, degree: int, origins: Sequence[Origin] = ()
) -> list[Fragment]:
    """The fragments of a tensor that is divided over tp ranks.

    Args:
        name: Its name; with ``origins``, what stands before their names.
        shape: The shape on this rank.
        sharding: How it is divided.
        rank: This rank's place in TP_GROUP.
        degree: How many ranks TP_GROUP has.
        origins: The tensors that it was made of, if it was.
    """
    global_shape = sharding.global_shape(shape, degree)
    zeros = (0,) * len(shape)
    boxes: list[tuple[Sides, Sides, Sides]] = []
    if sharding.dim is None:
        boxes.append((zeros, zeros, tuple(shape)))
    else:
        for own, there, count in sharding.slices(global_shape[sharding.dim], rank, degree):
            boxes.append(
                (
                    _with(zeros, sharding.dim, own),
                    _with(zeros, sharding.dim, there),
                    _with(tuple(shape), sharding.dim, count),
                )
            )
    if not origins:
        return [Fragment(name, global_shape, offset, first, size) for first, offset, size in boxes]
    return [fragment for box in boxes for origin in origins for fragment in _of_origin(name, origin, box)]


def _of_origin(prefix: str, origin: Origin, box: tuple[Sides, Sides, Sides]) -> Iterator[Fragment]:
    """The parts of a box of the whole that come from one of the tensors that the whole was made of."""
    first, offset, size = box
    for ours, theirs, count in origin.rows:
        begin, end = max(offset[0], ours), min(offset[0] + size[0], ours + count)
        if begin >= end:
            continue
        there = (theirs + begin - ours, *offset[1:])
        yield Fragment(
            prefix + origin.name,
            origin.shape,
            _exchanged(there) if origin.transposed else there,
            (first[0] + begin - offset[0], *first[1:]),
            (end - begin, *size[1:]),
            origin.transposed,
        )


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Sides, Sides]]:
    """Yield the boxes, offset and size, that a run of a tensor's elements is made of, in the order of elements."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    row, within = divmod(start, inner)
    if within or stop - start < inner:
        end = min(stop, (row + 1) * inner)
        for first, size in boxes_of_run(shape[1:], within, end - row * inner):
            yield (row, *first), (1, *size)
        row, start = row + 1, end
    count = (stop - start) // inner
    if count:
        yield (row, *(0,) * (len(shape) - 1)), (count, *shape[1:])
        row, start = row + count, start + count * inner
    for first, size in boxes_of_run(shape[1:], 0, stop - start):
        yield (row, *first), (1, *size)


def pieces(
    tensor: torch.Tensor, fragments: Iterable[Fragment], shape: Sequence[int] = (), run: tuple[int, int] | None = None
) -> Iterator[Piece]:
    """Yield the pieces that a tensor of this rank is; none of them is empty unless its whole tensor is.

    Args:
        tensor: The tensor.
        fragments: What it is, or, with a ``run``, what the tensor is of which it has a run of elements.
        shape: The shape of that tensor.
        run: The first element, and that after the last.
    """
    held = list(fragments)
    if run is None:
        for each in held:
            yield from _piece(tensor, each, each.first, each.size)
        return
    begin = 0
    for first, size in boxes_of_run(shape, *run):
        count = math.prod(size)
        block = tensor[begin : begin + count].view(size)
        begin += count
        for each in held:
            low = tuple(map(max, first, each.first))
            high = tuple(min(a + b, c + d) for a, b, c, d in zip(first, size, each.first, each.size, strict=True))
            if all(a < b for a, b in zip(low, high, strict=True)):
                yield from _piece(block, each, low, _minus(high, low), _minus(low, first))


def _piece(
    tensor: torch.Tensor, fragment: Fragment, first: Sides, size: Sides, within: Sides | None = None
) -> Iterator[Piece]:
    if 0 in size and 0 not in fragment.shape:
        return
    view = tensor
    for dim, (begin, count) in enumerate(zip(first if within is None else within, size, strict=True)):
        view = view.narrow(dim, begin, count)
    moved = _minus(first, fragment.first)
    moved = _exchanged(moved) if fragment.transposed else moved
    view = view.mT if fragment.transposed else view
    yield Piece(fragment.name, fragment.shape, tuple(map(sum, zip(fragment.offset, moved, strict=True))), view)


def _with(sides: Sides, dim: int, value: int) -> Sides:
    return (*sides[:dim], value, *sides[dim + 1 :])


def _minus(left: Sides, right: Sides) -> Sides:
    return tuple(a - b for a, b in zip(left, right, strict=True))


def _exchanged(sides: Sides) -> Sides:
    return (*sides[:-2], sides[-1], sides[-2])
