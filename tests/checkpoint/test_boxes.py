"""Boxes of runs, and pieces of divided tensors, held against counting elements."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.checkpoints.boxes import boxes_of_run, divided, pieces, whole
from shardwright.nn.huggingface.weights import Weight
from shardwright.tensor_parallel.sharding import Sharding

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def filled(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors of which no element has been found."""
    return {name: torch.full(shape, -1) for name, shape in shapes.items()}


def put(into: dict[str, torch.Tensor], found: object) -> None:
    """Put pieces into whole tensors; each element is there once."""
    for piece in found:  # type: ignore[attr-defined]
        box = into[piece.name]
        assert tuple(box.shape) == piece.shape
        for dim, (begin, size) in enumerate(zip(piece.offset, piece.size, strict=True)):
            box = box.narrow(dim, begin, size)
        assert (box == -1).all()
        box.copy_(piece.view)


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.data())
def test_a_run_is_made_of_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = torch.arange(count).view(shape)
    found = []
    for first, size in boxes_of_run(shape, start, stop):
        box = numbers
        for dim, (begin, length) in enumerate(zip(first, size, strict=True)):
            box = box.narrow(dim, begin, length)
        found += box.reshape(-1).tolist()
    assert found == list(range(start, stop))


@pytest.mark.parametrize(("by_head", "transposed"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize(("dims", "dim"), [(1, None), (1, 0), (2, None), (2, 0), (2, 1)])
@pytest.mark.parametrize("degree", [1, 2])
def test_parts_of_a_divided_weight_make_up_those_that_it_was_made_of(
    by_head: bool, transposed: bool, dims: int, dim: int | None, degree: int
) -> None:
    """As translation has it, for each tp rank, and for each cut of its part into runs."""
    heads, names = 4, ("x",) if by_head else ("q", "k", "v")
    rows = 12 if by_head else 4
    shape = (rows,) if dims == 1 else (6, rows) if transposed else (rows, 6)
    count = math.prod(shape)
    theirs = {name: torch.arange(count).view(shape) + 1000 * number for number, name in enumerate(names)}
    weight = Weight("ours", names, transposed and dims > 1, by_head)
    ours = weight.joined(list(theirs.values()), heads)
    blocks = (ours.shape[0] // 3,) * 3 if dim == 0 else ()
    sharding = Sharding(dim=dim, blocks=blocks)
    origins = weight.origins([shape] * len(names), heads)
    for cuts in ([], [1], [5, 7]):
        found = filled({f"layer.{name}": shape for name in names})
        for rank in range(degree if dim is not None else 1):
            part = sharding.shard(ours, rank, degree)
            assert part is not None
            fragments = divided("layer.", part.shape, sharding, rank, degree, origins)
            if not cuts:
                put(found, pieces(part, fragments))
                continue
            borders = [0, *(cut for cut in cuts if cut < part.numel()), part.numel()]
            for run in itertools.pairwise(borders):
                put(found, pieces(part.reshape(-1)[slice(*run)], fragments, part.shape, run))
        assert all(torch.equal(found[f"layer.{name}"], value) for name, value in theirs.items())


def test_rows_beyond_the_whole_are_no_part_of_it() -> None:
    table = torch.arange(15).view(5, 3)
    sharding, found = Sharding(dim=0, size=5), filled({"table": (5, 3)})
    for rank in range(4):
        part = sharding.shard(table, rank, 4)
        assert part is not None
        put(found, pieces(part, divided("table", part.shape, sharding, rank, 4)))
    assert torch.equal(found["table"], table)


def test_a_tensor_without_elements_is_a_piece() -> None:
    (piece,) = pieces(torch.zeros(0, 3), [whole("a", (0, 3))])
    assert piece.size == (0, 3)
