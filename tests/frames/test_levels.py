"""Rules 2 and 8: calls are closed once, in reverse order; every node runs once, with its whole gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardwright.errors import FrameError
from shardwright.frames.backward import _LevelBackward
from torch import nn

from tests.frames.comparing import Part, assert_exact, data, run_divided, times_weight, weighted_sum


class Counted(torch.autograd.Function):
    """Doubles, and counts how often its backward runs."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Counted.runs += 1
        return gradient * 2


def runs_of(model: Part, *inputs: torch.Tensor) -> int:
    """How often a :class:`Counted` ran divided, checked to be exact."""
    Counted.runs = 0
    assert_exact(model, *inputs)
    return Counted.runs // 2


def test_node_before_several_calls_runs_once() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = Counted.apply(x * root.weight)
        y = root.child(h) + h
        z = root.other(h + y)
        return y * z + h

    assert runs_of(Part(body, child=Part(times_weight), other=Part(times_weight)), data()) == 1


def test_node_between_calls_runs_once() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        a = root.child(x)
        h = Counted.apply(a)
        b, c = root.other(h), root.child(h)
        return root.other(b + c + a) + h

    assert runs_of(Part(body, child=Part(times_weight), other=Part(times_weight)), data()) == 1


def test_skip_connections_over_two_stages() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        a = root.child(h)
        b = root.third(a + h)
        c = root.other(b + a)
        return c + h * a

    model = Part(body, child=Part(times_weight), other=Part(times_weight), third=Part(times_weight))
    compared = assert_exact(model, data())
    assert compared.job.server.kinds == ["forward"] * 3 + ["backward"] * 3


def _levels_of(body: Any) -> list[list[str]]:
    """The calls that a backward asks for, level by level, in a model that is exact."""
    levels = []
    original = _LevelBackward.run_calls

    def run_calls(self: Any, calls: list[Any]) -> Any:
        levels.append([call.module for call in calls])
        return original(self, calls)

    model = Part(body, child=Part(times_weight), other=Part(times_weight), third=Part(times_weight))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_LevelBackward, "run_calls", run_calls)
        assert_exact(model, data())
    return levels


def test_independent_calls_go_backward_together() -> None:
    levels = _levels_of(lambda root, x: root.third(root.child(x) + root.other(x)))
    assert levels == [["third"], ["other", "child"]]


def test_gradients_go_from_call_to_call_where_results_were_passed_on_as_they_were() -> None:
    assert _levels_of(lambda root, x: root.third(root.other(root.child(x)))) == [["third"]]
    assert _levels_of(lambda root, x: root.child(root.child(root.child(x)))) == [["child"]]


def test_gradients_come_back_where_another_use_or_a_hook_needs_them() -> None:
    def used_twice(root: Part, x: torch.Tensor) -> torch.Tensor:
        first = root.child(x)
        return root.other(first) + first

    def hooked(root: Part, x: torch.Tensor) -> torch.Tensor:
        first = root.child(x)
        first.register_hook(lambda gradient: 2 * gradient)
        return root.other(first)

    for body in (used_twice, hooked, lambda root, x: root.other(2 * root.child(x))):
        assert _levels_of(body) == [["other"], ["child"]]


def test_calls_without_gradient_are_closed_once_last_first() -> None:
    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> None:
        first = model.child(*inputs)
        second = model.other(first)
        unused = model.child(second)
        assert unused.requires_grad
        backward(weighted_sum(first))

    model = Part(times_weight, child=Part(times_weight), other=Part(times_weight))
    compared = assert_exact(model, data(), step=step)
    requests = compared.job.server.requests
    assert [(request.kind, request.backward.forward) for request in requests[3:]] == [
        ("backward", 0),
        ("close", 2),
        ("close", 1),
    ]


def test_calls_of_a_step_without_backward_are_closed() -> None:
    model = Part(lambda m, x: m.child(x), child=Part(times_weight, third=Part(times_weight)))
    compared = run_divided(model, [data()], step=lambda model, backward, inputs: model(*inputs))
    assert compared.job.server.kinds == ["forward", "close"]
    assert compared.job.live_frames == 0


def test_closing_reaches_calls_of_calls() -> None:
    def middle(part: Part, x: torch.Tensor) -> Any:
        return part.third(x * part.weight)

    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> None:
        model.child(*inputs)
        backward(weighted_sum(inputs[0] * model.weight))

    compared = assert_exact(Part(times_weight, child=Part(middle, third=Part(times_weight))), data(), step=step)
    assert compared.job.server.kinds == ["forward", "forward", "close", "close"]


class Remembering(Part):
    """Adds to its result what it computed at the call before."""

    def __init__(self) -> None:
        super().__init__(times_weight)
        self.__dict__["last"] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.weight
        result = h if self.__dict__["last"] is None else h + self.__dict__["last"].tanh() * self.weight
        self.__dict__["last"] = h
        return result


def test_state_carried_from_call_to_call_brings_gradients_back() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        return root.child(h) + root.child(h * h) + root.child(h + 1)

    assert_exact(Part(body, child=Remembering()), data())


def test_calls_of_one_module_go_backward_last_first_whatever_their_results_lead_to() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        first, second = root.child(h), root.child(h * h)
        return first + root.other(second)  # the first call's result reaches the loss without a call between

    assert_exact(Part(body, child=Remembering(), other=Part(times_weight)), data())


def test_state_of_a_call_whose_result_is_unused_brings_gradients_back() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        root.child(x * root.weight)
        return root.child(x)

    compared = assert_exact(Part(body, child=Remembering()), data())
    assert compared.job.server.kinds == ["forward", "forward", "backward", "close"]


def test_state_in_a_module_called_from_another_rank_brings_gradients_back() -> None:
    def middle(part: Part, x: torch.Tensor) -> Any:
        return part.third(x * part.weight)

    def body(root: Part, x: torch.Tensor) -> Any:
        root.child(x * root.weight)
        return root.child(x + root.weight)

    assert_exact(Part(body, child=Part(middle, third=Remembering())), data())


def test_gradient_that_reaches_a_closed_call_is_an_error() -> None:
    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> None:
        y = model.child(*inputs)
        backward(weighted_sum(y))
        backward(weighted_sum(y))

    model = Part(times_weight, child=Part(lambda m, x: x + m.weight))
    with pytest.raises(FrameError, match="after its backward had run"):
        run_divided(model, [data()], step=step)


def test_two_backward_calls_in_one_step_function() -> None:
    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> Any:
        losses = [weighted_sum(model(x)) for x in inputs]
        for loss in losses:
            backward(loss)
        return [loss.detach() for loss in losses]

    def body(root: Part, x: torch.Tensor) -> Any:
        return root.child(x * root.weight)

    assert_exact(Part(body, child=Part(times_weight)), data(), data(), step=step)


def test_loss_lets_go_of_its_graph() -> None:
    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> Any:
        loss = weighted_sum(model(*inputs))
        backward(loss)
        return loss

    model = Part(lambda m, x: m.child(x * m.weight), child=Part(times_weight))
    assert not run_divided(model, [data()], step=step).result.requires_grad


def test_several_roots_with_given_gradients() -> None:
    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> None:
        y = model.child(inputs[0] * model.weight)
        backward([y, (y * y).sum()], [inputs[1], None])

    assert_exact(Part(times_weight, child=Part(times_weight)), data(), data(), step=step)


def _absorbing(root: Part, x: torch.Tensor) -> Any:
    """A node whose two edges leave a level, of which one leads to the other."""
    h = x * root.weight
    g = (h * 2).tanh()
    y = root.child(g)
    z = root.other(h)
    return (y + z) * g * h + g * h


@pytest.mark.parametrize("hooks", [False, True])
def test_level_that_the_engine_cannot_stop_in_runs_node_by_node(hooks: bool) -> None:
    runs = []
    original = _LevelBackward.run_node_by_node

    def spy(self: Any, *args: Any) -> None:
        runs.append(1)
        original(self, *args)

    class Inline(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x * y, x + y

    seen: list[tuple[torch.Tensor, ...]] = []

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        g = Counted.apply((h * 2).tanh())
        a, b = root.inline(h, g)
        y = root.child(g)
        z = root.other(y * h + g.sum())
        return (y + z) * a + b * h.sum(0)

    inline = Inline()
    if hooks:
        inline.register_full_backward_hook(lambda m, inputs, outputs: seen.append((*inputs, *outputs)))
    model = Part(body, child=Part(times_weight), other=Part(times_weight), inline=inline)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_LevelBackward, "run_node_by_node", spy)
        assert runs_of(model, data()) == 1
    assert runs
    if hooks:
        plain, divided = seen
        for one, other in zip(plain, divided, strict=True):
            torch.testing.assert_close(one, other)


def test_same_node_reached_by_paths_of_different_length() -> None:
    compared = assert_exact(Part(_absorbing, child=Part(times_weight), other=Part(times_weight)), data())
    assert compared.job.server.kinds.count("backward") == 2


def test_module_called_many_times() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        for _ in range(12):
            h = root.child(h).tanh() + h
        return h

    assert_exact(Part(body, child=Part(times_weight)), data())


def test_custom_functions_between_calls() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = Counted.apply(root.child(Counted.apply(x * root.weight)))
        return Counted.apply(root.other(Counted.apply(h)))

    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> None:
        backward(Counted.apply(weighted_sum(model(*inputs))))

    Counted.runs = 0
    assert_exact(Part(body, child=Part(times_weight), other=Part(times_weight)), data(), step=step)
    assert Counted.runs == 10


def test_loss_that_is_a_result_itself() -> None:
    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> Any:
        loss = model.child(inputs[0] * model.weight)
        backward(loss)
        return loss.detach()

    assert_exact(Part(times_weight, child=Part(lambda m, x: (x * m.weight).sum())), data(), step=step)
