"""Rule 10: hooks see whole gradients, and what would see a part of the graph is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardwright.errors import FrameError
from shardwright.frames import Frame, current_frame, in_frame
from torch.autograd import forward_ad

from tests.frames.comparing import Part, assert_exact, data, run_divided, times_weight, weighted_sum
from tests.frames.loopback import LoopbackJob, guarded


def test_hook_on_a_shared_tensor_sees_its_whole_gradient_once() -> None:
    seen: list[torch.Tensor] = []

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        h.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 0.5)
        y = root.child(h)
        return root.other(y + h) * h

    assert_exact(Part(body, child=Part(times_weight), other=Part(times_weight)), data())
    plain, divided = seen
    torch.testing.assert_close(plain, divided)


def test_hook_on_a_result_sees_its_whole_gradient_once() -> None:
    seen: list[torch.Tensor] = []

    def body(root: Part, x: torch.Tensor) -> Any:
        y = root.child(x * root.weight)
        y.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 3)
        return root.other(y) + y * y

    assert_exact(Part(body, child=Part(times_weight), other=Part(times_weight)), data())
    plain, divided = seen
    torch.testing.assert_close(plain, divided)


def test_removed_hook_does_not_fire() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        with h.register_hook(lambda gradient: gradient * 100):
            pass
        handle = h.register_hook(lambda gradient: gradient * 100)
        handle.remove()
        return root.child(h)

    assert_exact(Part(body, child=Part(times_weight)), data())


@pytest.mark.parametrize("write", [False, True])
def test_kept_gradient_is_whole_and_after_hooks(write: bool) -> None:
    kept: list[torch.Tensor] = []

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        h.retain_grad()
        kept.append(h)
        h.register_hook(lambda gradient: gradient * 2)
        y = root.child(h)
        if write:
            h.add_(1)
        return y.sum() + 3 * h.sum()

    assert_exact(Part(body, child=Part(lambda m, x: x + m.weight)), data())
    plain, divided = kept
    torch.testing.assert_close(divided.grad, plain.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["register_hook", "retain_grad"])
def test_hook_on_an_argument_is_refused(method: str) -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        x.retain_grad() if method == "retain_grad" else x.register_hook(print)
        return x * part.weight

    model = Part(lambda m, x: m.child(x * m.weight), child=Part(child))
    with pytest.raises(FrameError, match="on an argument of module 'child'"):
        run_divided(model, [data()])


def test_hook_on_a_tensor_that_a_child_wrote_to_is_refused() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        root.child(h)
        h.register_hook(print)
        return h

    model = Part(body, child=Part(lambda m, x: x.mul_(m.weight)))
    with pytest.raises(FrameError, match="wrote to in place"):
        run_divided(model, [data()])


def test_hook_on_a_result_that_has_one_in_its_module_is_refused() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        y = x * part.weight
        y.register_hook(lambda gradient: gradient * 2)
        return y

    def body(root: Part, x: torch.Tensor) -> Any:
        y = root.child(x)
        y.retain_grad()
        return y

    with pytest.raises(FrameError, match="which put hooks on tensors of its own"):
        run_divided(Part(body, child=Part(child)), [data()])


def _hook_the_result(root: Part, x: torch.Tensor) -> Any:
    y = root.child(x * root.weight)
    y.register_hook(lambda gradient: gradient * 2)
    return y


def test_hook_on_a_result_that_has_one_two_calls_further_on_is_refused() -> None:
    """Plain torch runs the hook of the tensor's maker first; across ranks the caller's would come before it."""

    def maker(part: Part, x: torch.Tensor) -> Any:
        y = x * part.weight
        y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return y

    passing = Part(lambda m, x: m.third(x * m.weight), third=Part(maker))
    with pytest.raises(FrameError, match="which put hooks on tensors of its own"):
        run_divided(Part(_hook_the_result, child=passing), [data()])
    computing = Part(lambda m, x: m.third(x) * m.weight, third=Part(maker))
    assert_exact(Part(_hook_the_result, child=computing), data())


def test_hook_on_a_leaf_that_has_one_where_it_was_made_is_refused() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        leaf = (x.detach() * part.weight.detach()).requires_grad_()
        leaf.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return leaf

    with pytest.raises(FrameError, match="which put hooks on tensors of its own"):
        run_divided(Part(_hook_the_result, child=Part(child)), [data()])


@pytest.mark.parametrize("views", [False, True])
def test_hook_on_one_of_several_results_is_refused(views: bool) -> None:
    """The other result may have been made of it, and would bring gradients that only the module's rank sees."""

    def child(part: Part, x: torch.Tensor) -> Any:
        first = x[0] if views else x * part.weight
        return first, first[:2] if views else first * part.weight

    def body(root: Part, x: torch.Tensor) -> Any:
        first, second = root.child(x * root.weight)
        first.retain_grad()
        return second

    with pytest.raises(FrameError, match="one of several results of module 'child'"):
        run_divided(Part(body, child=Part(child)), [data()])


def test_kept_gradient_of_a_view_that_is_written_later_is_refused() -> None:
    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> None:
        h = model.child(inputs[0] * model.weight)
        view = h[0]
        view.retain_grad()
        h.mul_(2)
        backward(weighted_sum(h))

    with pytest.raises(FrameError, match="retain_grad was called on a view"):
        run_divided(Part(times_weight, child=Part(lambda m, x: x + m.weight)), [data()], step=step)


def test_hook_of_a_leaf_runs_once_on_the_whole_gradient() -> None:
    seen: list[torch.Tensor] = []

    def body(root: Part, x: torch.Tensor) -> Any:
        x.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
        return root.child(x) * x + root.other(x * x)

    model = Part(body, child=Part(times_weight), other=Part(times_weight))
    assert_exact(model, data(needs_gradient=True))
    plain, divided = seen
    torch.testing.assert_close(plain, divided)


@pytest.mark.parametrize("where", ["root", "child"])
def test_module_backward_hooks_run_where_the_module_runs(where: str) -> None:
    seen: list[tuple[torch.Tensor, ...]] = []

    def hook(module: Any, inputs: Any, outputs: Any) -> Any:
        seen.append((*inputs, *outputs))
        return (inputs[0] * 2,)

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        return root.child(h) + h + root.child(h * 2)

    model = Part(lambda m, x: m.back(x * m.weight), back=Part(body, child=Part(times_weight)))
    (model.back if where == "root" else model.back.child).register_full_backward_hook(hook)
    assert_exact(model, data())
    half = len(seen) // 2
    assert half == (1 if where == "root" else 2)
    for one, other in zip(seen[:half], seen[half:], strict=True):
        assert all(torch.allclose(a, b) for a, b in zip(one, other, strict=True))


def test_forward_hooks_of_a_child_run_on_its_rank_only() -> None:
    ranks = []

    def hook(module: Any, args: Any, result: Any) -> Any:
        frame = current_frame()
        ranks.append(None if frame is None else frame.name)
        return result * 2

    model = Part(lambda m, x: m.child(x * m.weight), child=Part(times_weight))
    model.child.register_forward_hook(hook)
    assert_exact(model, data())
    assert ranks == [None, "module 'child'"]


def _grad_inside(root: Part, x: torch.Tensor, **kwargs: Any) -> Any:
    h = x * root.weight
    y = root.child(h)
    (gradient,) = torch.autograd.grad(weighted_sum(y), [h], **kwargs)
    return y + gradient


@pytest.mark.parametrize("kwargs", [{}, {"allow_unused": True}, {"create_graph": True}])
def test_autograd_grad_through_a_call_is_refused(kwargs: dict[str, bool]) -> None:
    model = Part(lambda m, x: _grad_inside(m, x, **kwargs), child=Part(times_weight))
    with pytest.raises(FrameError, match=r"torch.autograd.grad in the code of the step function"):
        run_divided(model, [data()])


@pytest.mark.parametrize("how", ["method", "function"])
def test_backward_through_a_call_is_refused(how: str) -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        loss = weighted_sum(root.child(x * root.weight))
        loss.backward() if how == "method" else torch.autograd.backward(loss)

    with pytest.raises(FrameError, match="backward in the code of the step function"):
        run_divided(Part(body, child=Part(times_weight)), [data()])


def test_backward_through_the_callers_part_is_refused() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        weighted_sum(part.third(x)).backward()

    model = Part(lambda m, x: m.child(x * m.weight), child=Part(child, third=Part(times_weight)))
    with pytest.raises(FrameError, match="backward in the code of module 'child'"):
        run_divided(model, [data()])


def test_backward_of_a_whole_child_reaching_its_argument_is_refused() -> None:
    model = Part(lambda m, x: m.child(x * m.weight), child=Part(lambda m, x: weighted_sum(x * m.weight).backward()))
    with pytest.raises(FrameError, match=r"outside model.backward"):
        run_divided(model, [data()])


def test_gradient_inside_one_module_is_allowed() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        y = (x * part.weight).tanh()
        (gradient,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
        return y, gradient * gradient

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        own = (h * h).sum()
        (gradient,) = torch.autograd.grad(own, [h], create_graph=True)
        return root.child(h), gradient

    assert_exact(Part(body, child=Part(child)), data())


@pytest.mark.parametrize("method", ["register_hook", "retain_grad"])
def test_gradient_inside_one_module_that_reaches_a_hook_is_refused(method: str) -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        h.retain_grad() if method == "retain_grad" else h.register_hook(lambda gradient: gradient * 2)
        (gradient,) = torch.autograd.grad((h * h).sum(), [root.weight], retain_graph=True)
        return root.child(h), gradient

    with pytest.raises(FrameError, match=r"torch.autograd.grad in the code of the step function reaches a tensor with"):
        run_divided(Part(body, child=Part(times_weight)), [data()])


def test_hook_on_a_tensor_that_is_carried_to_a_later_call_is_refused() -> None:
    """Backward of the later call would run the earlier one's part without its hooks."""

    def child(part: Part, x: torch.Tensor) -> Any:
        h = part.third(x) * part.weight
        h.register_hook(lambda gradient: gradient * 2)
        earlier, part.__dict__["kept"] = part.__dict__.get("kept"), h
        return h if earlier is None else h + earlier

    def body(root: Part, x: torch.Tensor) -> Any:
        return root.child(x * root.weight) * root.child(x)

    with pytest.raises(FrameError, match=r"from outside the call that made it"):
        run_divided(Part(body, child=Part(child, third=Part(times_weight))), [data()])


def test_functorch_around_a_call_is_refused() -> None:
    model = Part(lambda m, x: torch.func.vmap(m.child)(x), child=Part(times_weight))
    with pytest.raises(FrameError, match=r"torch.func transform"):
        run_divided(model, [data()])


def test_forward_mode_around_a_call_is_refused() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            return root.child(x)

    with pytest.raises(FrameError, match="forward-mode"):
        run_divided(Part(body, child=Part(times_weight)), [data()])


def test_saved_tensor_hooks_around_a_call_are_refused() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return root.child(x)

    with pytest.raises(FrameError, match="saved_tensors_hooks"):
        run_divided(Part(body, child=Part(times_weight)), [data()])


def test_saved_tensor_hooks_inside_one_module_are_allowed() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return (x * part.weight).tanh()

    assert_exact(Part(lambda m, x: m.child(x * m.weight), child=Part(child)), data())


def test_call_during_backward_is_refused() -> None:
    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, child: Any) -> torch.Tensor:
            ctx.child = child
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            return ctx.child(gradient), None

    model = Part(lambda m, x: Calling.apply(x * m.weight, m.child), child=Part(times_weight))
    with pytest.raises(FrameError, match="during backward"):
        run_divided(model, [data()])


def test_call_outside_a_step_is_refused() -> None:
    model = Part(lambda m, x: m.child(x), child=Part(times_weight))
    LoopbackJob(model, lambda name: int("child" in name))
    with pytest.raises(FrameError, match="outside a step"):
        model(data())


def test_guards_come_and_go_with_their_users() -> None:
    def now() -> tuple[Any, ...]:
        return (
            torch.Tensor.register_hook,
            torch.autograd._engine_run_backward,
            torch.utils.checkpoint.CheckpointFunction,
        )

    before = now()
    with guarded():
        with guarded():
            assert now()[1] is not before[1]
        assert now()[1] is not before[1]
    assert before == now()


def test_frame_ends_with_its_code_also_on_failure() -> None:
    with pytest.raises(ValueError, match="no"), in_frame(Frame(0)):
        raise ValueError("no")
    assert current_frame() is None


def test_failure_leaves_no_frame_behind() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        y = root.child(x)
        return root.other(y)

    def other(part: Part, x: torch.Tensor) -> Any:
        raise ValueError("no")

    model = Part(body, child=Part(times_weight), other=Part(other))
    job = LoopbackJob(model, lambda name: int(bool(name)))
    with guarded(), pytest.raises(ValueError, match="no"):
        job.run(lambda backward: model(data()))
    assert job.live_frames == 0
    assert current_frame() is None
    model.other.body = times_weight
    job.copies[1].other.body = times_weight
    with guarded():
        job.run(lambda backward: backward(weighted_sum(model(data()))))
    assert job.live_frames == 0
