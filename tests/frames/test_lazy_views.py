"""Results that torch conjugates or negates only when they are read: views of an argument that read its memory anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.frames.comparing import Part, assert_exact, data

#: A few numbers, and more than a message takes along.
SIZES = [(2, 6), (40, 160)]
VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "conjugate": lambda z: z.conj(),
    "adjoint": lambda z: z.mH,
    "conjugate of a part, twice": lambda z: z.conj()[:, :2].conj().t(),
    "of one argument": lambda z: (z.conj(), z.mH, z),
    "of another result": lambda z: (lambda y: (y.conj(), y.mH, y[:1].conj()))(z * 2j),
    "negative": lambda z: torch._neg_view(z),
    "negative conjugate": lambda z: torch._neg_view(z.conj()),
    "imaginary part": lambda z: z.conj().imag,
}
GIVEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda z: z,
    "conjugated by its caller": lambda z: z.conj(),
    "negated by its caller": lambda z: torch._neg_view(z),
}


def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> Any:
    result = model(*inputs)
    losses = []
    for tensor in tree_leaves(result):
        numbers = torch.view_as_real(tensor.resolve_conj().resolve_neg()) if tensor.is_complex() else tensor
        weights = torch.arange(1, numbers.numel() + 1, dtype=numbers.dtype).view(numbers.shape)
        losses.append((numbers * weights).square().sum())
    backward(sum(losses))
    return result


def complex_data(size: tuple[int, int]) -> torch.Tensor:
    return torch.complex(data(*size), data(*size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("given", GIVEN)
def test_lazy_view_of_an_argument_is_read_as_the_module_read_it(view: str, given: str, size: tuple[int, int]) -> None:
    def body(root: Part, z: torch.Tensor) -> Any:
        return root.child(GIVEN[given](z * root.weight.sum()))

    assert_exact(Part(body, child=Part(lambda m, z: VIEWS[view](z))), complex_data(size), step=step)


@pytest.mark.parametrize("size", SIZES)
def test_negative_view_of_an_argument_of_the_same_type_is_negative(size: tuple[int, int]) -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        return torch.view_as_complex(x.view(size[0], -1, 2)).conj().imag

    assert_exact(Part(lambda m, x: m.child(x * m.weight.sum()), child=Part(child)), data(*size), step=step)


@pytest.mark.parametrize("size", SIZES)
def test_write_to_a_lazy_view_reaches_the_callers_tensor_conjugated(size: tuple[int, int]) -> None:
    def body(root: Part, z: torch.Tensor) -> Any:
        h = z * root.weight.sum()
        y = root.child(h)
        y.mul_(2j)
        return h, y

    assert_exact(Part(body, child=Part(lambda m, z: z.mH)), complex_data(size), step=step)
