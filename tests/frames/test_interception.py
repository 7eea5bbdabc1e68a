"""Rules 11 and 12: every way to call a module that lives elsewhere is caught; a run of layers is one request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardwright.errors import FrameError
from shardwright.execution.intercept import refuse_compiled
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.frames.comparing import Part, assert_exact, data, run_divided, times_weight, weighted_sum
from tests.frames.loopback import LoopbackJob, guarded


def test_calling_forward_itself_is_caught() -> None:
    compared = assert_exact(Part(lambda m, x: m.child.forward(x * m.weight), child=Part(times_weight)), data())
    assert compared.job.server.kinds == ["forward", "backward"]


class Called(Part):
    """A module with a ``__call__`` of its own."""

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x * 2) + 1


class CalledPastHooks(Part):
    """One whose ``__call__`` runs no hooks."""

    def __call__(self, x: torch.Tensor) -> Any:
        return self.forward(x * 2) + 1


def hooked(kind: type[Part]) -> Part:
    child = kind(lambda part, x: x * part.weight.sum())
    child.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    child.register_forward_hook(lambda module, args, result: result * 2)
    child.register_full_backward_hook(lambda module, given, gradients: (given[0] * 3,))  # type: ignore[operator, index]
    return child


@pytest.mark.parametrize("size", [(2, 3), (40, 160)])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("way", ["forward", "__call__"])
@pytest.mark.parametrize("kind", [Part, Called, CalledPastHooks])
def test_a_call_runs_hooks_and_forward_does_not(
    kind: type[Part], way: str, checkpointed: bool, size: tuple[int, int]
) -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        call, x = getattr(root.child, way), x * root.weight.sum()
        return checkpoint(call, x, use_reentrant=False) if checkpointed else call(x)

    assert_exact(Part(body, child=hooked(kind)), data(*size))


def test_a_run_of_layers_runs_their_own_calls() -> None:
    layers = nn.Sequential(*(hooked(kind) for kind in (Part, Called, CalledPastHooks, Called)))
    owners = {"layers.1": 1, "layers.2": 1}
    model = Part(lambda m, x: m.layers(x * m.weight), layers=layers)
    assert_exact(model, data(), owners=lambda name: owners.get(name, 0))


def test_calling_a_childs_child_is_caught() -> None:
    model = Part(lambda m, x: m.child.inner(x * m.weight), child=Part(times_weight, inner=Part(times_weight)))
    compared = assert_exact(model, data(), owners=lambda name: int(bool(name)))
    assert [request.module for request in compared.job.server.requests] == [2, 2]


def test_remote_modules_are_left_alone_by_the_compiler() -> None:
    model = Part(lambda m, x: m.child(x), child=Part(times_weight))
    LoopbackJob(model, lambda name: int(bool(name)))
    assert model.child.forward._torchdynamo_disable
    assert model.child._compiled_call_impl._torchdynamo_disable


def test_compiled_module_with_parts_elsewhere_is_refused() -> None:
    model = Part(times_weight)
    refuse_compiled("model", model)
    model._compiled_call_impl = model.forward
    with pytest.raises(FrameError, match="'model' is compiled, but parts of it live on other ranks"):
        refuse_compiled("model", model)


def linear() -> nn.Module:
    return nn.Linear(3, 3).double()


def test_run_of_layers_on_one_rank_is_one_request() -> None:
    layers = nn.Sequential(linear(), nn.Tanh(), linear(), linear(), nn.ReLU(), linear(), nn.Tanh(), linear())
    model = Part(lambda m, x: m.layers(x * m.weight), layers=layers)
    owners = {"layers.2": 1, "layers.3": 1, "layers.5": 1, "layers.7": 2}
    compared = assert_exact(model, data(), owners=lambda name: owners.get(name, 0))
    forward = [(r.to, r.forward.range) for r in compared.job.server.requests if r.kind == "forward"]
    assert forward == [(1, (2, 6)), (2, None)]


def test_layer_that_stands_twice_runs_twice() -> None:
    activation, twice = nn.Tanh(), linear()
    layers = nn.Sequential(linear(), activation, twice, activation, twice, activation)
    owners = {"layers.2": 1}
    model = Part(lambda m, x: m.layers(x), layers=layers)
    compared = assert_exact(model, data(), owners=lambda name: owners.get(name, 0))
    assert compared.job.server.kinds.count("forward") == 1


def test_run_of_layers_keeps_hooks_and_modes() -> None:
    seen = []
    layers = nn.Sequential(linear(), nn.Tanh(), linear())
    layers[1].register_forward_hook(lambda module, args, result: seen.append(torch.is_grad_enabled()) or result * 2)
    model = Part(lambda m, x: m.layers(x * m.weight), layers=layers)
    assert_exact(model, data(), owners=lambda name: int(name in ("layers.0", "layers.2")))
    assert seen == [True, True]


def test_sequential_with_a_forward_of_its_own_is_not_grouped() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    model = Part(lambda m, x: m.layers(x), layers=Twice(linear(), linear()))
    compared = assert_exact(model, data(), owners=lambda name: int(name.startswith("layers.")))
    assert compared.job.server.kinds.count("forward") == 4


def test_keyword_only_arguments_and_defaults() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3).double())

        def forward(self, x: torch.Tensor, *, scale: float = 2.0, shift: torch.Tensor | None = None) -> torch.Tensor:
            return x * self.weight * scale if shift is None else x * self.weight * scale + shift

    def body(root: Part, x: torch.Tensor) -> Any:
        return root.child(x) + root.child(x=x, scale=3.0) + root.child(x, shift=x * root.weight)

    assert_exact(Part(body, child=Scaled()), data())


def test_data_dependent_branches() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = root.child(x * root.weight)
        while float(h.detach().abs().sum()) > 0.5:
            h = root.other(h) * 0.3 if float(h.detach().sum()) > 0 else root.child(h) * 0.2
        return h + x * root.weight

    for _ in range(5):
        assert_exact(Part(body, child=Part(times_weight), other=Part(times_weight)), data())


def test_nested_modules_over_three_ranks() -> None:
    def third(part: Part, x: torch.Tensor) -> Any:
        return part.back(x * part.weight) + part.back(x) * x

    def child(part: Part, x: torch.Tensor) -> Any:
        h = x * part.weight
        return part.third(h).tanh() + part.third(h + x)

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        return root.child(h) * root.child(h.relu()) + h

    model = Part(body, child=Part(child, third=Part(third, back=Part(times_weight))))
    compared = assert_exact(model, data())
    assert {request.to for request in compared.job.server.requests} == {0, 1, 2}


def test_buffers_change_on_their_owner() -> None:
    model = Part(lambda m, x: m.child(x * m.weight), child=nn.BatchNorm1d(3).double())
    assert_exact(model, data(8, 3))


def test_frozen_modules() -> None:
    def model() -> Part:
        return Part(lambda m, x: m.other(m.child(x * m.weight)), child=Part(times_weight), other=Part(times_weight))

    half = model()
    half.child.requires_grad_(False)
    assert_exact(half, data())
    most = model()
    most.child.requires_grad_(False)
    most.weight.requires_grad_(False)
    compared = assert_exact(most, data())
    assert compared.job.server.kinds == ["forward", "forward", "backward"]


def test_same_parameter_in_two_modules() -> None:
    model = Part(lambda m, x: m.child(x * m.weight) + m.other(x), child=Part(times_weight), other=Part(times_weight))
    model.other.weight = model.child.weight
    assert_exact(model, data())


def test_steps_follow_each_other() -> None:
    model = Part(lambda m, x: m.child(x * m.weight).relu(), child=Part(times_weight))
    job = LoopbackJob(model, lambda name: int(bool(name)))
    with guarded():
        for number in range(20):
            job.run(lambda backward: backward(weighted_sum(model(data()))), number)
            job.end_step()
            assert job.live_frames == 0


def test_unknown_failure_inside_a_child_is_its_own() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        run_divided(Part(lambda m, x: m.child(x), child=Part(child)), [data()])
