"""Operations are counted as PyTorch's own counter does, without what that imports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shardwright.partition.observe import OperationMode
from shardwright.partition.operations import count
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode


def counted(run: Callable[[], Any]) -> int:
    total = 0

    def after(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], result: Any) -> None:
        nonlocal total
        total += count(func, args, result)

    with torch.no_grad(), OperationMode(lambda _func, _tensors: None, lambda _tensor: None, after):
        run()
    return total


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


@pytest.mark.parametrize(
    "run",
    [
        lambda: ones(3, 4) @ ones(4, 5),
        lambda: ones(2, 3, 4) @ ones(2, 4, 5),
        lambda: torch.baddbmm(ones(2, 3, 5), ones(2, 3, 4), ones(2, 4, 5)),
        lambda: torch.nn.Linear(4, 5)(ones(2, 3, 4)),
        lambda: torch.mm(ones(3, 4), ones(4, 5), out=ones(3, 5)),
        lambda: functional.conv2d(ones(2, 4, 9, 7), ones(6, 2, 3, 3), groups=2, stride=2, padding=1),
        lambda: functional.conv1d(ones(2, 4, 9), ones(6, 4, 3), dilation=2),
        lambda: functional.conv_transpose2d(ones(2, 4, 5, 7), ones(4, 6, 3, 3), stride=2),
        lambda: ones(3, 4).exp().sum(),
    ],
    ids=["mm", "bmm", "baddbmm", "linear", "out", "conv2d", "conv1d", "transposed", "none"],
)
def test_as_many_as_torch_counts(run: Callable[[], Any]) -> None:
    with FlopCounterMode(display=False) as theirs:
        run()
    assert counted(run) == theirs.get_total_flops()


def test_attention_counts_its_two_products() -> None:
    query, key, value = ones(2, 3, 5, 8), ones(2, 3, 7, 8), ones(2, 3, 7, 8)
    assert counted(lambda: functional.scaled_dot_product_attention(query, key, value)) == 2 * (2 * 2 * 3 * 5 * 7 * 8)
