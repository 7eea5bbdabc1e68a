"""Hooks on a view that a module on another rank writes to: its gradient passes the view by, as torch has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shardwright.errors import FrameError

from tests.frames.comparing import Part, assert_exact, data, run_divided

#: A few numbers, and more than a message takes along.
SIZES = [(2, 6), (40, 160)]


def in_grad_mode(part: Part, x: torch.Tensor) -> Any:
    return x.mul_(part.weight.sum()) * 2


def without(part: Part, x: torch.Tensor) -> Any:
    with torch.no_grad():
        x.mul_(2)
    return x * part.weight.sum()


WRITES: dict[str, Callable[[Part, torch.Tensor], Any]] = {"in grad mode": in_grad_mode, "without": without}


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.1, 0.1) * 3


def hooked(given: str, on: str) -> Callable[[Part, torch.Tensor], Any]:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight.sum()
        tensors = {"base": h, "view": h[:, :], "part": h[:1]}
        tensors[on].register_hook(clamp)
        return root.child(tensors[given]), tensors["base"], tensors["part"]

    return body


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("given", ["base", "view", "part"])
@pytest.mark.parametrize("on", ["base", "view", "part"])
def test_hook_on_a_tensor_that_a_module_writes_to(on: str, given: str, write: str, size: tuple[int, int]) -> None:
    assert_exact(Part(hooked(given, on), child=Part(WRITES[write])), data(*size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("write", WRITES)
def test_hooks_on_views_of_views_see_their_other_uses(write: str, size: tuple[int, int]) -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight.sum()
        view = h[:, :]
        view.register_hook(lambda gradient: gradient * 3)
        part = view[:1]
        part.register_hook(lambda gradient: gradient * 5)
        before = part + view[:1]
        return root.child(part), h, view, before

    assert_exact(Part(body, child=Part(WRITES[write])), data(*size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("write", WRITES)
def test_hook_on_a_view_of_another_type(write: str, size: tuple[int, int]) -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = torch.view_as_complex((x * root.weight.sum()).view(size[0], -1, 2)).clone()
        view = torch.view_as_real(h)
        view.register_hook(clamp)
        return root.child(view), view

    assert_exact(Part(body, child=Part(WRITES[write])), data(*size))


def reads_first(part: Part, x: torch.Tensor) -> Any:
    before = x + part.weight.sum()
    return before + x.mul_(2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("child", [lambda part, x: x.add_(x) * part.weight.sum(), reads_first])
@pytest.mark.parametrize("given", ["view", "part"])
def test_a_write_and_another_use_of_a_view_with_a_hook_are_refused(
    given: str, child: Callable[[Part, torch.Tensor], Any], size: tuple[int, int]
) -> None:
    """The hook sees the gradient of that use alone in plain torch; across ranks the two come back as one."""
    with pytest.raises(FrameError, match=r"module 'child' wrote in place to an argument that it has used otherwise"):
        run_divided(Part(hooked(given, given), child=Part(child)), [data(*size)])


@pytest.mark.parametrize("size", SIZES)
def test_a_write_and_another_use_of_a_tensor_with_a_hook(size: tuple[int, int]) -> None:
    assert_exact(Part(hooked("base", "view"), child=Part(reads_first)), data(*size))
