"""A result of a module elsewhere that is used first where torch is in another mode than where it was made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.job.runtime import Runtime
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.frames.comparing import Part, assert_exact, data, run_divided
from tests.frames.job import Job, job_fixture

#: A few numbers, and more than a message takes along.
SIZES = [(2, 3), (40, 160)]

job = job_fixture(2)


def in_inference_mode(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        float(y.sum())
    return y * x


def closed_over_by_vmap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: (row * y).sum())(x)


def closed_over_by_a_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda given: (given * given * y).sum())(x.detach()) * x


def transformed_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    jacobian = torch.func.jacrev(lambda given: given * y.mean())(x[0])
    value, pull = torch.func.vjp(lambda given: (given.tanh() * y).sum(), x)
    return jacobian.sum() + pull(torch.ones_like(value))[0]


def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with FlopCounterMode(display=False) as counter:
        product = x @ y.t()
    assert counter.get_total_flops() == 2 * len(x) * len(y) * x.shape[1]
    return product.sum() * y


class Labelled(torch.Tensor):
    """A subclass of a script's own."""


def as_a_subclass(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    labelled = y.as_subclass(Labelled)
    assert type(labelled * 2) is Labelled
    return (labelled * x).as_subclass(torch.Tensor)


USES: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    in_inference_mode,
    closed_over_by_vmap,
    closed_over_by_a_gradient,
    as_a_subclass,
    counted,
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("use", USES)
def test_first_use_of_a_result(use: Callable[..., Any], needs_gradient: bool, size: tuple[int, int]) -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        x = x * root.weight.sum()
        return use(x, root.child(x if needs_gradient else x.detach()))

    def child(part: Part, x: torch.Tensor) -> torch.Tensor:
        return x * (part.weight if needs_gradient else part.weight.detach()).sum()

    assert_exact(Part(body, child=Part(child)), data(*size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("use", [*USES, transformed_twice])
def test_first_use_of_a_result_that_was_handed_on(use: Callable[..., Any], size: tuple[int, int]) -> None:
    """It lives on where it was handed to, and must not be written to here from its first use on."""

    def body(root: Part, x: torch.Tensor) -> Any:
        x = x * root.weight.sum()
        y = root.child(x)
        z = root.child(y)
        return use(x, y) + z.sum()

    assert_exact(Part(body, child=Part(lambda m, x: x * m.weight.sum())), data(*size))


def test_calls_in_inference_mode_with_what_needs_a_gradient() -> None:
    """Leaves have no edge there that torch could find."""

    def body(root: Part, x: torch.Tensor) -> Any:
        with torch.inference_mode():
            seen = float(root.child(x).sum() + root.child(root.weight).sum())
        return root.child(x * seen)

    assert_exact(Part(body, child=Part(lambda m, x: x * m.weight)), data(needs_gradient=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("of", ["leaf", "result", "view of a leaf", "view of a result"])
def test_writes_without_gradients_to_what_needs_one(of: str, made: Callable[[], Any], mode: Callable[[], Any]) -> None:
    """A write leaves the graph as it is, which torch cannot ask for the edge of a view in inference mode."""

    def body(root: Part, x: torch.Tensor) -> Any:
        whole = root.weight if of.endswith("leaf") else x * root.weight
        with made():
            given = whole[..., :2] if of.startswith("view") else whole
        with mode():
            root.child(given)
            seen = float(given.sum())
        return x * seen * (1 if of.endswith("leaf") else whole)

    assert_exact(Part(body, child=Part(lambda m, x: x.mul_(m.weight.detach()[:2].sum()))), data(needs_gradient=True))


def noted(where: str, edge_is_there: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    def body(root: Part, x: torch.Tensor) -> Any:
        y = root.child(x)
        z = {"leaf": root.weight, "result": y, "own": x * root.weight}[where]
        with torch.inference_mode():
            edge_is_there(z)
        return y * z

    return body


@pytest.mark.parametrize("where", ["result", "own"])
def test_hooks_that_are_registered_in_inference_mode(where: str) -> None:
    body = noted(where, lambda z: z.register_hook(lambda gradient: gradient * 2))
    assert_exact(Part(body, child=Part(lambda m, x: x * m.weight)), data(needs_gradient=True))


@pytest.mark.parametrize("where", ["leaf", "result", "own"])
def test_gradients_that_are_retained_in_inference_mode(where: str) -> None:
    body = noted(where, lambda z: z.retain_grad())
    assert_exact(Part(body, child=Part(lambda m, x: x * m.weight)), data(needs_gradient=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("use", [closed_over_by_a_gradient, transformed_twice])
def test_transforms_beside_a_call_without_gradients(use: Callable[..., Any], mode: Callable[[], Any]) -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        with mode():
            seen = float(use(x, root.child(x)).sum())
        return root.child(x) * seen

    assert_exact(Part(body, child=Part(lambda m, x: x * m.weight)), data())


def test_hook_on_several_gradients_is_refused() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        x = x * root.weight
        y = root.child(x)
        torch.autograd.graph.register_multi_grad_hook((x, y), lambda gradients: None)
        return x + y

    with pytest.raises(FrameError, match=r"register_multi_grad_hook .* use register_hook on each tensor"):
        run_divided(Part(body, child=Part(lambda m, x: x * m.weight)), [data()])


def test_counting_operations_around_a_call_is_refused() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        with FlopCounterMode(display=False):
            return root.child(x)

    with pytest.raises(
        FrameError, match=r"under the torch dispatch mode _FlopCounterMode.* enter it inside the module"
    ):
        run_divided(Part(body, child=Part(lambda m, x: x * m.weight)), [data()])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("around", ["step", "call"])
def test_counting_operations_around_a_step_or_a_call_in_it_is_refused_and_the_next_step_is_exact(
    job: Job, around: str, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    batch, width = data(2 * size[0], size[1]), size[1]
    plain = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).double()
    plain(batch).square().mean().backward()

    def main(runtime: Runtime) -> BaseException:
        module = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).double()
        smp.set_partition(module[1], 1)
        model = smp.DistributedModel(module)
        model.load_state_dict(plain.state_dict())

        def counting(where: str) -> AbstractContextManager[Any]:
            return FlopCounterMode(display=False) if where == around else nullcontext()

        @smp.step
        def train(inputs: torch.Tensor, *, plainly: bool) -> None:
            with nullcontext() if plainly else counting("call"):
                result = model(inputs)
            model.backward(result.square().mean())

        with pytest.raises((FrameError, RemoteError)) as caught, counting("step"):
            train(batch, plainly=False)
        train(batch, plainly=True)
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        return caught.value

    settings = {"auto_partition": False, "default_partition": 0, "microbatches": 2}
    for rank, error in enumerate(job.run(main, settings)):
        assert isinstance(error, FrameError if around == "step" or rank == 0 else RemoteError), error
        assert "was called under the torch dispatch mode _FlopCounterMode" in str(error)
