"""Primitives beside the same mathematics in one process, computed from the inputs of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shardwright.tensor_parallel.communicators import (
    bwd_allreduce_for_tp,
    fused_allgather_for_tp,
    fwd_allreduce_for_tp,
    reduce_scatter_for_tp,
    scatter_and_merge_for_tp,
)
from shardwright.tensor_parallel.group import TensorGroup

Reference = Callable[[list[torch.Tensor]], list[torch.Tensor]]

#: Batches of the ranks.
BATCHES = {2: ([2, 2], [3, 1], [0, 2], [0, 0]), 4: ([1, 1, 1, 1], [2, 0, 3, 1])}

#: How many elements of each rank's input finite differences move, about.
MOVED_ELEMENTS = 2


@dataclass
class Case:
    """A primitive with inputs of all ranks.

    Attributes:
        name: For messages.
        shapes: Of each rank's input.
        run: The primitive.
        reference: The outputs of all ranks from the inputs of all.
        replicated: What ``fwd_allreduce_for_tp`` gives counts once in the loss.
        one_input: All ranks have the same input; its gradient is the whole one on each.
    """

    name: str
    shapes: list[tuple[int, ...]]
    run: Callable[[TensorGroup, torch.Tensor], torch.Tensor]
    reference: Reference
    replicated: bool = False
    one_input: bool = False

    def inputs(self, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """Of all ranks, the same numbers on each."""
        same = 0 if self.one_input else 1
        return [random(7 + same * rank, shape, dtype) for rank, shape in enumerate(self.shapes)]


def random(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers that depend on nothing but the seed, of any dtype."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(tuple(shape), generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(tuple(shape), generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 50, tuple(shape), generator=generator).to(dtype)


def gathered(dim: int) -> Reference:
    return lambda xs: [torch.cat(xs, dim)] * len(xs)


def scattered(dim: int, sizes: Sequence[int]) -> Reference:
    return lambda xs: list(torch.split(sum(xs[1:], xs[0]), list(sizes), dim))


def exchanged(split: int, merge: int, sizes: Sequence[int]) -> Reference:
    def of(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        pieces = [torch.split(x, list(sizes), split) for x in xs]
        return [torch.cat([piece[rank] for piece in pieces], merge) for rank in range(len(xs))]

    return of


def cases(n: int) -> Iterator[Case]:
    """Every primitive along every dim, with the batches of ranks equal, unequal and empty."""
    for sizes in BATCHES[n]:
        for dim in (0, 1, -1):
            at = dim % 3
            shapes = [tuple(b if i == at else 2 for i in range(3)) for b in sizes]
            summed = [tuple(sum(sizes) if i == at else 2 for i in range(3))] * n
            yield Case(f"gather {sizes} {dim}", shapes, _gather(dim, None), gathered(dim))
            yield Case(f"gather known {sizes} {dim}", shapes, _gather(dim, sizes), gathered(dim))
            yield Case(f"scatter known {sizes} {dim}", summed, _scatter(dim, sizes), scattered(dim, sizes))
        for split, merge in ((-1, 0), (1, 0), (0, 1), (0, -1)):
            shape = [2, 2, 2]
            shape[split] = n
            shapes = [tuple(b if i == merge % 3 else size for i, size in enumerate(shape)) for b in sizes]
            even = [1] * n
            yield Case(
                f"exchange {sizes} {split} {merge}", shapes, _exchange(split, merge), exchanged(split, merge, even)
            )
            # And the way back: unequal slices, equal parts.
            shape[split] = sum(sizes)
            shape[merge] = 1
            run = _exchange(split, merge, split_sizes=sizes, merge_sizes=even)
            yield Case(f"back {sizes} {split} {merge}", [tuple(shape)] * n, run, exchanged(split, merge, sizes))
    even = [2] * n
    yield Case("scatter", [(3, 2 * n)] * n, _scatter(1, None), scattered(1, even))
    yield Case("scatter one dim", [(2 * n,)] * n, _scatter(-1, None), scattered(0, even))
    yield Case("exchange within a dim", [(2 * n, 2)] * n, _exchange(0, 0), exchanged(0, 0, even))
    for shape in ((2, 3), (), (0, 3)):
        yield Case(
            f"forward sum {shape}",
            [shape] * n,
            lambda group, x: fwd_allreduce_for_tp(x, group=group),
            lambda xs: [sum(xs[1:], xs[0])] * len(xs),
            replicated=True,
        )
        yield Case(
            f"backward sum {shape}",
            [shape] * n,
            lambda group, x: bwd_allreduce_for_tp(x, group=group),
            lambda xs: [x.clone() for x in xs],
            one_input=True,
        )


def _gather(dim: int, sizes: Sequence[int] | None) -> Callable[[TensorGroup, Any], Any]:
    return lambda group, x: fused_allgather_for_tp(x, dim, group=group, sizes=sizes)


def _scatter(dim: int, sizes: Sequence[int] | None) -> Callable[[TensorGroup, Any], Any]:
    return lambda group, x: reduce_scatter_for_tp(x, dim, group=group, sizes=sizes)


def _exchange(split: int, merge: int, **sizes: Sequence[int]) -> Callable[[TensorGroup, Any], Any]:
    return lambda group, x: scatter_and_merge_for_tp(x, split, merge, group=group, **sizes)


def loss_of(case: Case, outputs: Sequence[torch.Tensor], ranks: Sequence[int]) -> torch.Tensor:
    """The sum of what the ranks' outputs cost, each in its own way, and not linearly."""
    total = torch.zeros((), dtype=torch.float64)
    for output, rank in zip(outputs, ranks, strict=True):
        weights = random(100 + (0 if case.replicated else rank), output.shape)
        total = total + (weights * output.sin()).sum()
    return total


def check(case: Case, group: TensorGroup) -> None:
    """Outputs, gradients, gradients of gradients, and finite differences over the whole job."""
    ranks = list(range(group.size))
    whole = [x.requires_grad_() for x in case.inputs()]
    leaves = [whole[0]] * group.size if case.one_input else whole
    expected = case.reference(leaves)
    count = ranks[:1] if case.replicated else ranks
    reference = loss_of(case, expected[: len(count)], count)
    gradients = torch.autograd.grad(reference, whole[:1] if case.one_input else whole, create_graph=True)
    mine = gradients[0 if case.one_input else group.rank]

    own = case.inputs()[group.rank].requires_grad_()
    output = case.run(group, own)
    assert output.shape == expected[group.rank].shape, (case.name, output.shape, expected[group.rank].shape)
    close(output, expected[group.rank], case.name)
    loss = loss_of(case, [output], [group.rank])
    (gradient,) = torch.autograd.grad(loss, own, create_graph=True)
    close(gradient, mine, f"gradient of {case.name}")
    if not case.replicated and not case.one_input:  # a pair for replicated values is no derivative of one loss
        sum_of_squares = sum((g.square().sum() for g in gradients), torch.zeros((), dtype=torch.float64))
        second = torch.autograd.grad(sum_of_squares, whole)[group.rank]
        close(torch.autograd.grad(gradient.square().sum(), own)[0], second, f"second gradient of {case.name}")
    differences(case, group, gradient.detach())


def differences(case: Case, group: TensorGroup, gradient: torch.Tensor, step: float = 1e-5) -> None:
    """Elements of each rank's input are moved; the job's loss must change as the gradient says."""
    inputs = case.inputs()
    moves, losses = [], []
    for rank in range(1 if case.one_input else group.size):
        size = math.prod(case.shapes[rank])
        for element in range(0, size, max(1, size // MOVED_ELEMENTS)):
            moves.append((rank, element))
            for move in (step, -step):
                moved = inputs[group.rank].clone()
                if rank == group.rank or case.one_input:
                    moved.view(-1)[element] += move
                with torch.no_grad():
                    losses.append(loss_of(case, [case.run(group, moved)], [group.rank]))
    if not moves:
        return
    (total,) = group.all_reduce([torch.stack(losses).view(-1, 2) / (group.size if case.replicated else 1)])
    for (rank, element), (up, down) in zip(moves, total.tolist(), strict=True):
        if rank == group.rank or case.one_input:
            difference = abs((up - down) / (2 * step) - gradient.reshape(-1)[element].item())
            assert difference < 1e-8, (case.name, rank, element, difference)


def close(actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def like(group: TensorGroup, *, optimize: str | None = None, prescaled_batch: bool | None = None) -> TensorGroup:
    """The same ranks and back ends with other settings, and counts of its own."""
    return TensorGroup(
        group._process_group,
        optimize=optimize or group.optimize,
        prescaled_batch=group.prescaled_batch if prescaled_batch is None else prescaled_batch,
        back_end=group._back_end,
        host=group._host,
        enter=group._enter,
    )
