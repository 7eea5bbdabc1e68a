"""Rule 10: ``torch.autograd.grad`` runs in a frame whose graph is cut, if no path to its inputs is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardwright.errors import FrameError

from tests.frames.comparing import Part, assert_exact, data, run_divided, times_weight


def _with_gradient(output: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(output.sum(), [h], create_graph=True)
    return output + gradient


def _beside_a_call(root: Part, x: torch.Tensor) -> Any:
    h = x * root.weight
    return _with_gradient(root.child(x * 2) * h * h, h)


def _of_a_result(root: Part, x: torch.Tensor) -> Any:
    y = root.child(x * root.weight)
    return _with_gradient((y * y).tanh() * root.other(x), y)


def _in_front_of_a_call(root: Part, x: torch.Tensor) -> Any:
    y = root.child(x)
    h = y * root.weight
    return root.other(_with_gradient(h * h * h, h))


@pytest.mark.parametrize("body", [_beside_a_call, _of_a_result, _in_front_of_a_call])
def test_gradient_beside_a_cut_is_exact(body: Any) -> None:
    assert_exact(Part(body, child=Part(times_weight), other=Part(times_weight)), data())


def _around_a_result(root: Part, x: torch.Tensor) -> Any:
    y = root.child(x * root.weight)
    return _with_gradient(y * root.other(y), y)


def _by_what_a_module_keeps(root: Part, x: torch.Tensor) -> Any:
    h = x * root.weight
    root.child(h)
    return _with_gradient(root.child(x.detach() * 2) * h, h)


def _of_a_weight_that_is_used_elsewhere(root: Part, x: torch.Tensor) -> Any:
    return _with_gradient(root.child(x) * root.weight, root.weight)


@pytest.mark.parametrize("body", [_around_a_result, _by_what_a_module_keeps, _of_a_weight_that_is_used_elsewhere])
def test_gradient_that_may_go_through_a_cut_is_refused(body: Any) -> None:
    with pytest.raises(FrameError, match=r"torch.autograd.grad in the code of the step function reaches a module"):
        run_divided(Part(body, child=Part(times_weight), other=Part(times_weight)), [data()])


def test_gradient_of_one_of_several_results_is_refused() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        first = x * part.weight
        return first, first * first

    def body(root: Part, x: torch.Tensor) -> Any:
        first, second = root.child(x * root.weight)
        return _with_gradient(first * second, first)

    with pytest.raises(FrameError, match=r"torch.autograd.grad in the code of the step function reaches a module"):
        run_divided(Part(body, child=Part(child)), [data()])


@pytest.mark.parametrize("both", [False, True])
def test_gradient_of_an_argument_that_another_is_made_of_is_refused(both: bool) -> None:
    def child(part: Part, first: torch.Tensor, second: torch.Tensor) -> Any:
        inputs = [first, second] if both else [first]
        gradient = torch.autograd.grad((first * second).sum(), inputs, create_graph=True)[0]
        return gradient * part.weight

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        return root.child(h, h * 2)

    with pytest.raises(FrameError, match=r"is given one argument as input and reaches another"):
        run_divided(Part(body, child=Part(child)), [data()])


def test_gradient_of_an_argument_beside_one_without_gradient_is_exact() -> None:
    def child(part: Part, first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> Any:
        (gradient,) = torch.autograd.grad((first * second).sum(), [first], create_graph=True)
        return gradient * third * part.weight

    assert_exact(Part(lambda m, x: m.child(x * m.weight, x, x - m.weight), child=Part(child)), data())
