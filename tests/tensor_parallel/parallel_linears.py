"""Column- and row-parallel linears beside whole ones, replicated, sliced along a sequence, and overlapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from cases import close, random
from shardwright.errors import ConfigError
from shardwright.nn.linear import ColumnParallelLinear, RowParallelLinear
from shardwright.nn.parallel_linear import ParallelLinear
from shardwright.tensor_parallel.group import Count, TensorGroup
from shardwright.tensor_parallel.layouts import FEATURES, PARTIAL, WHOLE, Layout, slices
from torch import nn

WIDTH, INNER, MESSAGE, NUMBER = 6, 8, 512, 8

#: How a sequence is cut over ranks.
SEQUENCES = {1: ([3],), 2: ([2, 2], [3, 1], [0, 3], [0, 0]), 4: ([1, 1, 1, 1], [2, 0, 3, 1])}


def check(group: TensorGroup) -> None:
    for bias in (True, False):
        replicated(group, bias)
        for sizes in SEQUENCES[group.size]:
            for dim in (0, 1, -2) if bias else (1,):
                for asynchronous in (False, True):
                    for known in (False, True):
                        sliced(group, sizes, dim, asynchronous, known, bias)
    every_layout(group)
    differentiated_twice(group)
    partly_frozen(group)
    starts_as_nn_linear(group)
    overlapped_in_half_precision(group)
    counted(group)
    saved_for_backward(group)
    refused(group)


def whole_block(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    layers = nn.Linear(WIDTH, INNER, bias, dtype=torch.float64), nn.Linear(INNER, WIDTH, bias, dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate(p for layer in layers for p in layer.parameters()):
            parameter.copy_(random(seed, parameter.shape))
    return layers


def divided_block(
    whole: tuple[nn.Linear, nn.Linear], group: TensorGroup, **options: object
) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    bias, dtype = whole[0].bias is not None, whole[0].weight.dtype
    column = ColumnParallelLinear(WIDTH, INNER, bias, group=group, dtype=dtype, **options)
    row = RowParallelLinear(INNER, WIDTH, bias, group=group, dtype=dtype, **options)
    column.load_whole_state_dict(whole[0].state_dict())
    row.load_whole_state_dict(whole[1].state_dict())
    return column, row


def compare_gradients(
    whole: tuple[nn.Linear, nn.Linear], divided: tuple[ColumnParallelLinear, RowParallelLinear], what: str
) -> None:
    for one, part in zip(whole, divided, strict=True):
        group = part.tp_group
        for name, parameter in one.named_parameters():
            expected = part.shardings[name].shard(parameter.grad, group.rank, group.size)
            own = getattr(part, name)
            assert (own is None) == (expected is None)
            if own is not None:
                close(own.grad, expected, f"gradient of {name}: {what}")


def replicated(group: TensorGroup, bias: bool) -> None:
    """All ranks have the same, which counts once."""
    for shape in ((3,), (2, 4), (0, 4)):
        whole = whole_block(bias)
        divided = divided_block(whole, group)
        x = random(9, (*shape, WIDTH)).requires_grad_()
        own = x.detach().clone().requires_grad_()
        weights = random(10, (*shape, WIDTH))
        expected = whole[1](whole[0](x).tanh())
        output = divided[1](divided[0](own).tanh())
        close(output, expected, "replicated")
        (weights * expected.sin()).sum().backward()
        (weights * output.sin()).sum().backward()
        close(own.grad, x.grad, "replicated: gradient of the input")
        compare_gradients(whole, divided, "replicated")


def sliced(group: TensorGroup, sizes: list[int], dim: int, asynchronous: bool, known: bool, bias: bool) -> None:
    """Each rank has its slice of a sequence, and a loss of its own."""
    rank = group.rank
    what = f"sequence {sizes} in dim {dim}, asynchronous {asynchronous}"
    whole = whole_block(bias)
    divided = divided_block(whole, group, sequence_dim=dim, asynchronous=asynchronous)
    at = dim % 3
    shapes = [tuple(size if i == at else 2 for i in range(2)) for size in sizes]
    xs = [random(20 + r, (*shape, WIDTH)).requires_grad_() for r, shape in enumerate(shapes)]
    weights = [random(30 + r, x.shape) for r, x in enumerate(xs)]
    expected = whole[1](whole[0](torch.cat(xs, dim)).tanh()).split(sizes, dim)
    sum((w * output.sin()).sum() for w, output in zip(weights, expected, strict=True)).backward()
    own = xs[rank].detach().clone().requires_grad_()
    told = {"sizes": sizes, "needs_grad": True} if known else {}
    inner = divided[0](own, **told).tanh()
    output = divided[1](inner, **(told if known or len(set(sizes)) == 1 else {"sizes": sizes}))
    close(output, expected[rank], what)
    (weights[rank] * output.sin()).sum().backward()
    close(own.grad, xs[rank].grad, f"gradient of the input: {what}")
    compare_gradients(whole, divided, what)


def part(whole: torch.Tensor, layout: Layout, sizes: list[int], group: TensorGroup) -> torch.Tensor:
    """What a rank has of activations; of a sum the first rank has all."""
    if layout == FEATURES:
        return whole.chunk(group.size, -1)[group.rank].contiguous()
    if layout == PARTIAL:
        return whole if group.rank == 0 else torch.zeros_like(whole)
    return whole if layout.dim is None else whole.split(sizes, layout.dim)[group.rank]


def every_layout(group: TensorGroup) -> None:
    """From any layout to any other, with and without overlap where something is sent beside products."""
    sizes = SEQUENCES[group.size][-1]
    for taken in (WHOLE, FEATURES, slices(0)):
        for given in (WHOLE, FEATURES, PARTIAL, slices(0)):
            column = taken != FEATURES and given == FEATURES
            overlaps = column or (taken == FEATURES and given not in (FEATURES, PARTIAL))
            for inside in (False, True) if slices(0) not in (taken, given) else (False,):
                for overlap in (False, True)[: 1 + overlaps]:
                    one_layout(group, taken, given, sizes, inside, overlap)


def one_layout(group: TensorGroup, taken: Layout, given: Layout, sizes: list[int], inside: bool, overlap: bool) -> None:
    """One layer of two blocks inside another module, or of one block alone."""
    what, width = f"{taken} to {given}, inside {inside}, overlap {overlap}", 4 * group.size
    whole = nn.Linear(width, 2 * INNER, dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate(whole.parameters()):
            parameter.copy_(random(seed, parameter.shape))
    blocks, place = [INNER] * 2 if inside else [2 * INNER], {"device": None, "dtype": torch.float64}
    one = ParallelLinear(
        width, blocks, True, input=taken, output=given, overlap=overlap, inside=inside, group=group, **place
    )
    one.load_whole_state_dict(whole.state_dict())
    x, weights = random(5, (sum(sizes), width)).requires_grad_(), random(6, (sum(sizes), 2 * INNER))
    expected = whole(x)
    (expected * weights).sum().backward()
    own = part(x.detach(), taken, sizes, group).clone().requires_grad_()
    sliced = slices(0) in (taken, given)
    found = one(own, **({"sizes": sizes, "needs_grad": True} if sliced else {}))
    loss = torch.zeros((), dtype=torch.float64)
    for output, of, weight in zip(
        found if inside else [found], expected.detach().split(blocks, -1), weights.split(blocks, -1), strict=True
    ):
        if given == PARTIAL:
            close(group.all_reduce([output.detach()])[0], of, what)
            loss = loss + (output * weight).sum()
        else:
            close(output, part(of, given, sizes, group), what)
            loss = loss + (output * part(weight, given, sizes, group)).sum()
    loss.backward()
    close(own.grad, part(x.grad, taken, sizes, group), f"gradient of the input: {what}")
    for name, parameter in one.named_parameters():
        gradient = whole.get_parameter(name).grad
        close(parameter.grad, one.shardings[name].shard(gradient, group.rank, group.size), f"of {name}: {what}")


def differentiated_twice(group: TensorGroup) -> None:
    """The gradient of a gradient's norm, through collectives that run beside products."""
    sizes = SEQUENCES[group.size][-1]
    whole = whole_block()
    for asynchronous in (False, True):
        divided = divided_block(whole, group, sequence_dim=0, asynchronous=asynchronous)
        x = random(1, (sum(sizes), WIDTH)).requires_grad_()
        own = x.detach().split(sizes)[group.rank].clone().requires_grad_()
        (first,) = torch.autograd.grad(whole[1](whole[0](x).tanh()).sin().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        output = divided[1](divided[0](own, sizes=sizes, needs_grad=True).tanh(), sizes=sizes, needs_grad=True)
        (own_first,) = torch.autograd.grad(output.sin().sum(), own, create_graph=True)
        close(own_first, first.split(sizes)[group.rank], f"once, asynchronous {asynchronous}")
        (own_second,) = torch.autograd.grad(own_first.square().sum(), own)
        close(own_second, second.split(sizes)[group.rank], f"twice, asynchronous {asynchronous}")


def partly_frozen(group: TensorGroup) -> None:
    """Inputs that are data; parameters of one rank only that are trained."""
    n, rank = group.size, group.rank
    for asynchronous in (False, True):
        whole = whole_block()
        divided = divided_block(whole, group, sequence_dim=0, asynchronous=asynchronous)
        for layer in divided:
            layer.requires_grad_(rank == 0)
        xs = [random(r, (2, WIDTH)) for r in range(n)]
        whole[1](whole[0](torch.cat(xs))).sin().sum().backward()
        divided[1](divided[0](xs[rank])).sin().sum().backward()
        if rank == 0:
            compare_gradients(whole, divided, "on one rank")
        assert (divided[0].weight.grad is None) == (rank > 0)
        # A frozen layer passes gradients on.
        divided = divided_block(whole, group, sequence_dim=0, asynchronous=asynchronous)
        for layer in (*divided, *whole):
            layer.requires_grad_(False)
        whole_input = torch.cat(xs).requires_grad_()
        whole[1](whole[0](whole_input)).sin().sum().backward()
        own = xs[rank].clone().requires_grad_()
        divided[1](divided[0](own)).sin().sum().backward()
        close(own.grad, whole_input.grad.chunk(n)[rank], "through frozen layers")
        with torch.no_grad():
            assert not divided[1](divided[0](own)).requires_grad


def starts_as_nn_linear(group: TensorGroup) -> None:
    for make in (ColumnParallelLinear, RowParallelLinear):
        torch.manual_seed(3)
        whole = nn.Linear(WIDTH * group.size, INNER)
        torch.manual_seed(3)
        divided = make(WIDTH * group.size, INNER, group=group)
        for name, parameter in whole.named_parameters():
            own, expected = getattr(divided, name), divided.shardings[name].shard(parameter, group.rank, group.size)
            assert (own is None) == (expected is None)
            assert own is None or torch.equal(own, expected)


def overlapped_in_half_precision(group: TensorGroup) -> None:
    """Under autocast both ways compute alike, backward too."""
    results = []
    for asynchronous in (False, True):
        whole = tuple(layer.float() for layer in whole_block())
        divided = divided_block(whole, group, sequence_dim=0, asynchronous=asynchronous)
        x = random(group.rank, (2, WIDTH), torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = divided[1](divided[0](x))
        output.float().square().sum().backward()
        assert output.dtype == torch.bfloat16
        assert divided[0].weight.grad.dtype == torch.float32
        results.append((output.float(), x.grad, divided[0].weight.grad, divided[1].weight.grad))
    for plain, overlapped in zip(*results, strict=True):
        torch.testing.assert_close(overlapped, plain, rtol=5e-2, atol=5e-2 * plain.abs().max().item())


def counted(group: TensorGroup) -> None:
    n, rank, others = group.size, group.rank, group.size - 1
    if n == 1:
        return
    whole, told = whole_block(), MESSAGE * others

    def expect(what: str, **counts: tuple[int, int]) -> None:
        wanted = {kind: Count(*count) for kind, count in counts.items()}
        assert group.counts == wanted, (what, group.counts, wanted)
        group.counts.clear()

    group.counts.clear()
    divided = divided_block(whole, group)
    x = random(0, (n, WIDTH)).requires_grad_()
    summed = (1, 2 * others * WIDTH * NUMBER)
    output = divided[1](divided[0](x))
    expect("replicated", agree=(2, 2 * told), all_reduce=summed)
    output.sum().backward()
    expect("its backward", all_reduce=summed)
    output = divided[1](divided[0](x.detach(), needs_grad=False), needs_grad=True)
    output.sum().backward()
    expect("of data, known", all_reduce=summed)

    sizes = SEQUENCES[n][1]
    own, total = sizes[rank], sum(sizes)
    gathered, scattered = own * WIDTH * NUMBER * others, (total - own) * WIDTH * NUMBER
    for asynchronous in (False, True):
        divided = divided_block(whole, group, sequence_dim=0, asynchronous=asynchronous)
        x = random(rank, (own, WIDTH)).requires_grad_()
        output = divided[1](divided[0](x, sizes=sizes), sizes=sizes)
        expect("sequence", all_gather=(1, gathered), reduce_scatter=(1, scattered))
        output.sum().backward()
        again = int(asynchronous)  # the column gathers its input again
        expect("its backward", all_gather=(1 + again, (1 + again) * gathered), reduce_scatter=(1, scattered))


@contextmanager
def saved_bytes(parameters: set[int]) -> Iterator[list[int]]:
    """The sizes of what is saved for backward, parameters not counted."""
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def saved_for_backward(group: TensorGroup) -> None:
    """The overlapped column keeps the own slice of its input only."""
    n = group.size
    for asynchronous in (False, True):
        divided = divided_block(whole_block(), group, sequence_dim=0, asynchronous=asynchronous)
        weights = {p.untyped_storage().data_ptr() for layer in divided for p in layer.parameters()}
        with saved_bytes(weights) as sizes:
            inner = divided[0](random(group.rank, (4, 3, WIDTH)).requires_grad_())
        assert sum(sizes) == 4 * 3 * WIDTH * NUMBER * (1 if asynchronous else n), sizes
        with saved_bytes(weights) as sizes:
            divided[1](inner)
        assert sum(sizes) == n * 4 * 3 * INNER // n * NUMBER, sizes


def refused(group: TensorGroup) -> None:
    n, first = group.size, group.rank == 0

    def expect(pattern: str, run: Callable[[], object]) -> None:
        with pytest.raises(ConfigError, match=pattern) as caught:
            run()
        print(f"refused: {caught.value}")
        assert group.all_reduce([torch.ones(1)])[0].item() == n

    for make in (ColumnParallelLinear, RowParallelLinear):
        expect(
            r"asynchronous is True and sequence_dim None",
            lambda m=make: m(4, 4, asynchronous=True, group=group),
        )
        one = make(4, 4, group=group)
        expect(r"expected \[..., \d\]", lambda o=one: o(torch.ones(2, 5)))
        sequence = make(4 * n, 4 * n, sequence_dim=1, group=group)
        wide = sequence.weight.shape[1]
        expect(r"sequence_dim 1 is the dim of features", lambda s=sequence, f=wide: s(torch.ones(n * 2, f)))
        expect(r"dim 1 is out of range", lambda s=sequence, f=wide: s(torch.ones(f)))
        features = one.weight.shape[1]
        for asynchronous in (False, True):
            given = make(4, 4, sequence_dim=0, asynchronous=asynchronous, group=group)
            expect(r"expected one for each", lambda g=given, f=features: g(torch.ones(2, f), sizes=[2] * (n + 1)))
            if make is RowParallelLinear:
                expect(r"say 7 together", lambda g=given, f=features: g(torch.ones(2, f), sizes=[7] + [0] * (n - 1)))
        if n > 1:
            expect(r"shapes have to be the same", lambda o=one, f=features: o(torch.ones(2 + first, f)))
            expect(
                r"dtypes have to be", lambda o=one, f=features: o(torch.ones(2, f).to((torch.half, torch.float)[first]))
            )
    if n > 1:
        expect(r"a size of 5 in dim 0", lambda: ColumnParallelLinear(4, 5, group=group))
        expect(r"a size of 5 in dim 1", lambda: RowParallelLinear(5, 4, group=group))
        row = RowParallelLinear(4, 4, sequence_dim=0, asynchronous=True, group=group)
        expect(r"does not divide", lambda: row(torch.ones(n + 1, 4 // n)))
