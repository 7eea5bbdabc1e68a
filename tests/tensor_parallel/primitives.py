"""What primitives take besides plain tensors: other dtypes and strides, lists, ranks that need no gradient."""

from __future__ import annotations

import torch
from cases import BATCHES, close, exchanged, gathered, random, scattered
from shardwright.tensor_parallel.communicators import (
    bwd_allreduce_for_tp,
    fused_allgather_for_tp,
    fwd_allreduce_for_tp,
    reduce_scatter_for_tp,
    scatter_and_merge_for_tp,
)
from shardwright.tensor_parallel.group import TensorGroup

MOVED = (torch.float8_e4m3fn, torch.uint16, torch.bool)
SUMMED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def check(group: TensorGroup) -> None:
    for dtype in (*MOVED, *SUMMED):
        dtypes(group, dtype)
    half_precision_is_rounded_once(group)
    complex_gradients(group)
    strides(group)
    one_element_with_no_stride(group)
    lists(group)
    ranks_that_need_no_gradient(group)
    results_may_be_written_to(group)


def dtypes(group: TensorGroup, dtype: torch.dtype) -> None:
    n, rank = group.size, group.rank
    sizes = BATCHES[n][1]
    xs = [random(r, (b, n), dtype) for r, b in enumerate(sizes)]
    same(fused_allgather_for_tp(xs[rank], 0, group=group), gathered(0)(xs)[rank])
    same(scatter_and_merge_for_tp(xs[rank], 1, 0, group=group), exchanged(1, 0, [1] * n)(xs)[rank])
    if dtype in SUMMED:
        xs = [random(r, (sum(sizes), 3), dtype) for r in range(n)]
        wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)
        total = sum((x.to(wide) for x in xs[1:]), xs[0].to(wide)).to(dtype)
        same(reduce_scatter_for_tp(xs[rank], 0, group=group, sizes=sizes), total.split(sizes)[rank])
        summed = fwd_allreduce_for_tp(xs[rank], group=group)
        assert summed.dtype == dtype
        # The back end may add in another order, and rounds half precision at every addition.
        tolerance = 2e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6
        torch.testing.assert_close(summed, total, rtol=tolerance, atol=tolerance)


def half_precision_is_rounded_once(group: TensorGroup) -> None:
    """256 + 1 is 256 in bfloat16, however often; with one rounding it is 258 for three ones or more."""
    x = torch.full((group.size,), 256.0 if group.rank == 0 else 1.0, dtype=torch.bfloat16)
    expected = torch.tensor([256.0 + group.size - 1]).to(torch.bfloat16)
    same(reduce_scatter_for_tp(x, 0, group=group), expected)


def complex_gradients(group: TensorGroup) -> None:
    n, rank = group.size, group.rank
    xs = [random(r, (2, n), torch.complex128).requires_grad_() for r in range(n)]
    weights = [random(50 + r, (2, 2), torch.complex128) for r in range(n)]

    def loss(output: torch.Tensor, r: int) -> torch.Tensor:
        return (weights[r] * output.reshape(2, 2, -1).sum(-1) ** 2).real.sum()

    whole = exchanged(1, 0, [1] * n)(xs)
    total = sum(loss(output, r) for r, output in enumerate(whole))
    expected = torch.autograd.grad(total, xs)[rank]
    own = xs[rank].detach().conj().resolve_conj().conj().requires_grad_()  # its memory holds the conjugate
    assert own.is_conj()
    loss(scatter_and_merge_for_tp(own, 1, 0, group=group), rank).backward()
    close(own.grad, expected, "complex gradient")


def strides(group: TensorGroup) -> None:
    n, rank = group.size, group.rank
    for change in (
        lambda x: x.transpose(0, 2),
        lambda x: x[:, ::2],
        lambda x: x[1:],
        lambda x: x[:, :1].expand(-1, 4, -1),
        lambda x: x.flip(0).transpose(0, 1),
    ):
        whole = [random(r, (4, 4, 4)).requires_grad_() for r in range(n)]
        xs = [change(x) for x in whole]
        sizes = [0] * (n - 1) + [xs[0].shape[1]]
        for run, reference in (
            (lambda x: fused_allgather_for_tp(x, 1, group=group), gathered(1)),
            (lambda x: fused_allgather_for_tp(x, 0, group=group), gathered(0)),
            (lambda x, s=sizes: reduce_scatter_for_tp(x, 1, group=group, sizes=s), scattered(1, sizes)),
            (lambda x: scatter_and_merge_for_tp(x, 2, 0, group=group), exchanged(2, 0, [xs[0].shape[2] // n] * n)),
        ):
            expected = reference(xs)
            weights = [random(70 + r, expected[r].shape) for r in range(n)]
            total = sum((w * e).sum() for w, e in zip(weights, expected, strict=True))
            gradients = torch.autograd.grad(total, whole, retain_graph=True)
            own = random(rank, (4, 4, 4)).requires_grad_()
            output = run(change(own))
            close(output, expected[rank], "strides")
            # A gradient with strides of its own.
            (output.permute(2, 1, 0) * weights[rank].permute(2, 1, 0)).sum().backward()
            close(own.grad, gradients[rank], "gradient of strides")


def one_element_with_no_stride(group: TensorGroup) -> None:
    """As the gradient of a sum has it."""
    for number, size in ((group.rank, 1), (0, 0)):
        gathered_ones = fused_allgather_for_tp(torch.tensor(float(number)).expand(size), 0, group=group)
        assert gathered_ones.tolist() == [float(rank) for rank in range(group.size * size)]


def lists(group: TensorGroup) -> None:
    """One collective, whatever is in the list; gradients of what has one."""
    n, rank = group.size, group.rank
    sizes = BATCHES[n][1]
    shapes = [(3,), (5, n), (1, n, 2)]
    kinds = [torch.float8_e4m3fn, torch.float64, torch.int64, torch.float32]

    def tensors(r: int) -> list[torch.Tensor]:
        made = [random(r, (sizes[r], *shape), kind) for shape, kind in zip([*shapes, (n,)], kinds, strict=True)]
        return [x.requires_grad_() if x.dtype in (torch.float32, torch.float64) else x for x in made]

    whole = [tensors(r) for r in range(n)]
    expected = [torch.cat([xs[i] for xs in whole]) for i in range(4)]
    own = tensors(rank)
    before = group.counts["all_gather"].number
    outputs = fused_allgather_for_tp(own, 0, group=group)
    assert isinstance(outputs, list)
    assert group.counts["all_gather"].number == before + 1
    for output, wanted in zip(outputs, expected, strict=True):
        same(output, wanted.detach())
    # The result of one tensor is used, that of the other not: it has a zero gradient.
    (outputs[1] * (rank + 1)).sum().backward()
    close(own[1].grad, torch.full_like(own[1], n * (n + 1) / 2), "gradient of a list")
    assert own[3].grad is not None
    assert not own[3].grad.any()

    own = tensors(rank)
    moved = scatter_and_merge_for_tp([own[1], own[3]], -1, 0, group=group)
    for i, output in zip((1, 3), moved, strict=True):
        close(output, exchanged(-1, 0, [1] * n)([xs[i] for xs in whole])[rank], "a list's exchange")
    (moved[0].sum() + moved[1].sum()).backward()
    assert own[1].grad.eq(1).all()
    assert own[3].grad.eq(1).all()

    summed = [random(rank, (n, 2)), random(rank, (2 * n,), torch.int16), random(10 + rank, (n,))]
    totals = [sum(random(r, (n, 2)) for r in range(n)), None, sum(random(10 + r, (n,)) for r in range(n))]
    before = group.counts["all_reduce"].number
    reduced = fwd_allreduce_for_tp([summed[0], summed[2]], group=group)
    assert group.counts["all_reduce"].number == before + 1
    slices = reduce_scatter_for_tp(summed, 0, group=group)
    for i, result in zip((0, 2), reduced, strict=True):
        close(result, totals[i], "a list's sum")
        close(slices[i], totals[i].chunk(n)[rank], "a list's slices")
    assert slices[1].dtype == torch.int16
    back = [x.requires_grad_() for x in (random(0, (2,)), random(1, (3,)))]
    results = bwd_allreduce_for_tp(back, group=group)
    (results[0] * (rank + 1)).sum().backward()
    assert back[0].grad.eq(n * (n + 1) / 2).all()
    assert back[1].grad.eq(0).all()


def ranks_that_need_no_gradient(group: TensorGroup) -> None:
    """Rank 0's tensor needs a gradient, to which all ranks' losses contribute; theirs are data."""
    n, rank = group.size, group.rank
    for by_slice, run in (
        (False, lambda x: fused_allgather_for_tp(x, 0, group=group)),
        (True, lambda x: reduce_scatter_for_tp(x, 0, group=group)),
        (True, lambda x: scatter_and_merge_for_tp(x, 0, 1, group=group)),
        (False, lambda x: bwd_allreduce_for_tp(x, group=group)),
    ):
        x = torch.ones(n, 2, dtype=torch.float64, requires_grad=rank == 0)
        output = run(x)
        assert output.requires_grad
        (output * (rank + 1)).sum().backward()
        if rank == 0:
            each = torch.arange(1.0, n + 1, dtype=torch.float64).unsqueeze(1)
            close(x.grad, (each if by_slice else each.sum()).expand(n, 2), "gradient on one rank")
    with torch.no_grad():
        assert not fused_allgather_for_tp(torch.ones(2, requires_grad=True), 0, group=group).requires_grad
    assert not fused_allgather_for_tp(torch.ones(2), 0, group=group).requires_grad


def results_may_be_written_to(group: TensorGroup) -> None:
    n = group.size
    for gradient, run in (
        (3 * n, lambda x: fused_allgather_for_tp(x, 0, group=group)),
        (3 * n, lambda x: fused_allgather_for_tp(x, 1, group=group)),
        (3 * n, lambda x: fused_allgather_for_tp([x, x], 1, group=group)[1]),
        (3, lambda x: reduce_scatter_for_tp(x, 0, group=group)),
        (3, lambda x: scatter_and_merge_for_tp(x, 0, 1, group=group)),
        (3, lambda x: fwd_allreduce_for_tp(x, group=group)),
        (3, lambda x: fwd_allreduce_for_tp([x, x], group=group)[1]),
    ):
        x = torch.ones(n, n, requires_grad=True)
        run(x).mul_(3).sum().backward()
        assert x.grad.eq(gradient).all()
        assert x.detach().eq(1).all()


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
