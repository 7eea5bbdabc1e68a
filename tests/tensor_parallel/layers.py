"""A divided linear layer beside the whole one on the batches of all ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import close, like, random
from shardwright.errors import ConfigError
from shardwright.nn.linear import DistributedLinear
from shardwright.tensor_parallel.group import TensorGroup
from torch import nn


def check(group: TensorGroup) -> None:
    n = group.size
    batches = {1: ([2], [0]), 2: ([3, 1], [2, 2], [0, 3]), 4: ([2, 0, 3, 1], [1, 1, 1, 1])}[n]
    for sizes in batches:
        for middle in ((), (3,), (2, 3)):
            for bias in (True, False):
                linear(group, [(size, *middle, 8) for size in sizes], bias)
    same_samples(group)
    frozen_weight(group)
    starts_as_nn_linear(group)
    layers_follow_one_another(group)
    changing_batches(group)
    copies_share_the_group(group)


def whole_linear(bias: bool = True, in_features: int = 8, out_features: int = 5) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, bias, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(random(1, layer.weight.shape))
        if bias:
            layer.bias.copy_(random(2, layer.bias.shape))
    return layer


def divided_linear(whole: nn.Linear, group: TensorGroup) -> DistributedLinear:
    layer = DistributedLinear(
        whole.in_features, whole.out_features, whole.bias is not None, group=group, dtype=whole.weight.dtype
    )
    layer.load_whole_state_dict(whole.state_dict())
    return layer


def linear(group: TensorGroup, shapes: list[tuple[int, ...]], bias: bool) -> None:
    rank = group.rank
    whole = whole_linear(bias)
    divided = divided_linear(whole, group)
    inputs = [random(10 + r, shape).requires_grad_() for r, shape in enumerate(shapes)]
    weights = [random(20 + r, (*shape[:-1], 5)) for r, shape in enumerate(shapes)]
    expected = whole(torch.cat(inputs)).split([shape[0] for shape in shapes])
    sum((w * output.sin()).sum() for w, output in zip(weights, expected, strict=True)).backward()

    own = inputs[rank].detach().clone().requires_grad_()
    output = divided(own)
    close(output, expected[rank], "output")
    (weights[rank] * output.sin()).sum().backward()
    close(own.grad, inputs[rank].grad, "gradient of the input")
    close(divided.weight.grad, whole.weight.grad.chunk(group.size, 1)[rank], "gradient of the weight")
    assert (divided.bias is not None) == (bias and rank == 0)
    if divided.bias is not None:
        close(divided.bias.grad, whole.bias.grad, "gradient of the bias")


def same_samples(group: TensorGroup) -> None:
    """With ``prescaled_batch`` all ranks bring the same samples, which count once; nothing is sent but sums."""
    same = like(group, prescaled_batch=True)
    for shape, bias in (((3, 8), True), ((0, 8), True), ((2, 3, 8), False)):
        whole = whole_linear(bias)
        divided = divided_linear(whole, same)
        x, own = (random(10, shape).requires_grad_() for _ in range(2))
        same.counts.clear()
        expected, output = whole(x), divided(own)
        close(output, expected, "output of the same samples")
        if group.size > 1:
            assert {kind: count.number for kind, count in same.counts.items()} == {"agree": 1, "all_reduce": 1}
        for one in (expected, output):
            one.sin().sum().backward()
        close(own.grad, x.grad, "gradient of the same samples")
        close(divided.weight.grad, whole.weight.grad.chunk(group.size, 1)[group.rank], "gradient of the weight")
        if divided.bias is not None:
            close(divided.bias.grad, whole.bias.grad, "gradient of the bias")
    if group.size > 1:
        with pytest.raises(ConfigError, match="shapes have to be the same on all tp ranks, but there are"):
            divided(random(0, (1 + group.rank, 8)))


def frozen_weight(group: TensorGroup) -> None:
    """Only the bias is trained, which is on tp rank 0: the other ranks send it their gradients all the same."""
    whole = whole_linear()
    whole.weight.requires_grad_(False)
    divided = divided_linear(whole, group)
    divided.weight.requires_grad_(False)
    divided(random(group.rank, (2, 8))).sum().backward()
    if divided.bias is not None:
        close(divided.bias.grad, torch.full((5,), 2.0 * group.size, dtype=torch.float64), "gradient of the bias")


def starts_as_nn_linear(group: TensorGroup) -> None:
    torch.manual_seed(3)
    whole = nn.Linear(8, 5, dtype=torch.bfloat16)
    torch.manual_seed(3)
    divided = DistributedLinear(8, 5, group=group, dtype=torch.bfloat16)
    assert torch.equal(divided.weight, whole.weight.chunk(group.size, 1)[group.rank])
    assert divided.weight.untyped_storage().nbytes() == divided.weight.numel() * 2
    x = random(group.rank, (2, 8), torch.bfloat16)
    torch.testing.assert_close(divided(x), whole(x), rtol=2e-2, atol=2e-2)


def layers_follow_one_another(group: TensorGroup) -> None:
    """Several collectives in backward, in one order on all ranks; a step of training changes what it should."""
    rank, n = group.rank, group.size
    whole = nn.Sequential(whole_linear(), nn.Tanh(), whole_linear(in_features=5 * 8, out_features=8), nn.Tanh())
    whole[2] = whole_linear(False, 8, 8)
    whole[0] = whole_linear(True, 8, 8)
    divided = nn.Sequential(*(divided_linear(m, group) if isinstance(m, nn.Linear) else copy.copy(m) for m in whole))
    xs = [random(30 + r, (1 + r, 8)) for r in range(n)]
    for model, x in ((whole, torch.cat(xs)), (divided, xs[rank])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    close(divided(xs[rank]), whole(torch.cat(xs)).split([1 + r for r in range(n)])[rank], "after training", 1e-10)


def changing_batches(group: TensorGroup) -> None:
    """One rank changes its batch and the others do not."""
    whole = whole_linear()
    divided = divided_linear(whole, group)
    for call in range(3):
        x = random(call, (2 + (call if group.rank == 0 else 0), 8))
        close(divided(x), whole(x), f"call {call}")


def copies_share_the_group(group: TensorGroup) -> None:
    divided = divided_linear(whole_linear(), group)
    x = random(group.rank, (2, 8))
    assert torch.equal(copy.deepcopy(divided)(x), divided(x))
