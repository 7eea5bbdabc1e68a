"""Rules 1 and 3 to 6: what a tensor is after a call, whoever writes to it, whatever shares its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardwright.errors import FrameError

from tests.frames.comparing import Part, assert_exact, data, run_divided, times_weight, weighted_sum


def test_write_after_a_call_does_not_redirect_its_gradient() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        y = root.child(h)
        h.mul_(3)
        h.add_(root.weight)
        return y, h

    assert_exact(Part(body, child=Part(lambda m, x: x * 2 + m.weight)), data())


def test_write_to_a_result_counts() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        y = root.child(x * root.weight)
        y[:1].mul_(root.weight)
        y.relu_()
        return root.child(y)

    assert_exact(Part(body, child=Part(times_weight)), data())


def test_write_to_an_argument_between_two_calls_is_seen_by_the_second_only() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        first = root.child(h)
        h.sub_(1)
        return first, root.child(h)

    assert_exact(Part(body, child=Part(lambda m, x: x + m.weight)), data())


def test_returned_argument_is_the_callers_own_tensor() -> None:
    same = []

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        first, y = root.child(h)
        same.append(first is h)
        first.mul_(2)
        return h, y

    assert_exact(Part(body, child=Part(lambda m, x: (x, x + m.weight))), data())
    assert same == [True, True]


def test_view_of_an_argument_is_a_view_of_the_callers_tensor() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        row, column = root.child(h)
        row.mul_(2)
        h.add_(1)
        column.mul_(root.weight[:1])
        return h, row, column

    compared = assert_exact(Part(body, child=Part(lambda m, x: (x[0], x.t()[1:2].t()))), data())
    _, row, column = compared.result
    assert row._base is column._base is not None


def test_view_of_another_result_is_a_view_of_it() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        y, row = root.child(x)
        row.mul_(2)
        y.mul_(root.weight)
        return y, row

    def child(part: Part, x: torch.Tensor) -> Any:
        y = x * part.weight
        return y, y[1]

    assert_exact(Part(body, child=Part(child)), data())


def test_views_of_a_tensor_that_is_not_returned_still_share_memory() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        one, other = root.child(x)
        one.mul_(root.weight)
        return one, other

    def child(part: Part, x: torch.Tensor) -> Any:
        y = x * part.weight
        return y[:2], y[1:]

    assert_exact(Part(body, child=Part(child)), data(3, 3))


def test_views_keep_gradient_when_their_base_is_written_in_the_child() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        row = x[0]
        x.mul_(part.weight)
        row.mul_(2)
        return row

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        row = root.child(h)
        return h, row * 3

    assert_exact(Part(body, child=Part(child)), data())


def test_view_made_under_no_grad_carries_no_gradient() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        with torch.no_grad():
            return x[0], x * part.weight

    assert_exact(Part(lambda m, x: (m.child(x * m.weight)[0] * 2, x * m.weight), child=Part(child)), data())


def test_kept_gradient_of_a_tensor_that_a_child_writes_to_is_refused() -> None:
    """Torch keeps the gradient of the value after the write, of which some comes from inside the child."""

    def child(part: Part, x: torch.Tensor) -> Any:
        x.copy_(x.detach() * part.weight)
        return x * part.weight

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        h.retain_grad()
        return root.child(h), h

    with pytest.raises(FrameError, match="wrote to in place would not see"):
        run_divided(Part(body, child=Part(child)), [data()])


def test_hook_on_a_view_made_under_no_grad_sees_nothing() -> None:
    """Such a view says that it requires a gradient, and torch drops it; so is the caller's tensor."""
    seen: list[torch.Tensor] = []

    def child(part: Part, x: torch.Tensor) -> Any:
        with torch.no_grad():
            return part.weight.view_as(part.weight)

    def body(root: Part, x: torch.Tensor) -> Any:
        view = root.child(x)
        assert view.requires_grad
        assert view.grad_fn is None
        view.register_hook(seen.append)
        return view * root.weight

    assert_exact(Part(body, child=Part(child)), data())
    assert not seen


def test_one_tensor_given_twice_is_one_tensor_there() -> None:
    def child(part: Part, x: torch.Tensor, *, again: torch.Tensor) -> Any:
        assert x is again
        return x * again * part.weight

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        return root.child(h, again=h)

    compared = assert_exact(Part(body, child=Part(child)), data())
    assert len(compared.job.server.requests[0].parts) == 1


def test_one_tensor_returned_twice_is_one_tensor_here() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        one, other = root.child(x)
        assert one is other
        one.mul_(2)
        return one, other

    def child(part: Part, x: torch.Tensor) -> Any:
        y = x * part.weight
        return y, y

    assert_exact(Part(body, child=Part(child)), data())


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_child_may_write_to_its_argument(needs_gradient: bool) -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        x.mul_(part.weight)
        x[0].add_(1)
        return x.sum()

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight if needs_gradient else x.clone()
        before = h.sum()
        total = root.child(h)
        return before, h * 2, total

    assert_exact(Part(body, child=Part(child)), data())


def test_child_may_write_to_a_view_given_to_it() -> None:
    def child(part: Part, x: torch.Tensor) -> None:
        x.mul_(part.weight)

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        root.child(h[1:])
        return h

    assert_exact(Part(body, child=Part(child)), data(3, 3))


def test_write_under_no_grad_in_the_child_changes_values_only() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        with torch.no_grad():
            x.mul_(2)
        return x.sum(0) * part.weight.detach()

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x + root.weight
        return h * 3, root.child(h), h + 1

    assert_exact(Part(body, child=Part(child)), data())


def test_write_under_no_grad_reaches_a_leaf() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        with torch.no_grad():
            x.mul_(2)
        return x + part.weight

    assert_exact(Part(lambda m, x: m.child(x), child=Part(child)), data(needs_gradient=True))


def test_write_to_a_leaf_is_torchs_own_error() -> None:
    model = Part(lambda m, x: m.child(x), child=Part(lambda m, x: x.mul_(m.weight)))
    with pytest.raises(RuntimeError, match="leaf"):
        run_divided(model, [data(needs_gradient=True)])


def test_write_with_history_under_the_callers_no_grad_keeps_the_history() -> None:
    def child(part: Part, x: torch.Tensor) -> None:
        with torch.enable_grad():
            x.mul_(part.weight)

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x.clone()
        with torch.no_grad():
            root.child(h)
        return h * 2

    assert_exact(Part(body, child=Part(child)), data())


def test_write_to_one_of_two_arguments_that_share_memory_is_refused() -> None:
    model = Part(lambda m, x: m.child(x, x[0]), child=Part(lambda m, x, row: x.add_(1) * m.weight + row))
    with pytest.raises(FrameError, match="shares memory with another argument"):
        run_divided(model, [data()])


def test_write_to_an_expanded_argument_is_refused() -> None:
    model = Part(lambda m, x: m.child(x[:1].expand(2, 3)), child=Part(lambda m, x: x[:1].mul_(2) * m.weight))
    with pytest.raises(FrameError, match="whose elements share memory"):
        run_divided(model, [data()])


def _detached(part: Part, x: torch.Tensor) -> Any:
    return x.detach(), x * part.weight


def test_alias_that_cannot_be_rebuilt_may_be_read() -> None:
    assert_exact(Part(lambda m, x: m.child(x * m.weight), child=Part(_detached)), data())


@pytest.mark.parametrize("late", [False, True])
def test_write_to_an_alias_that_cannot_be_rebuilt_is_refused(late: bool) -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        alias, y = root.child(h)
        if late:  # not only until the next call
            y = root.other(y)
        alias.mul_(2)
        del alias  # not only while it lives
        return h, y

    model = Part(body, child=Part(_detached), other=Part(times_weight))
    with pytest.raises(FrameError, match="returned tensors that share memory"):
        run_divided(model, [data()])


def _keeping(part: Part, x: torch.Tensor) -> Any:
    part.kept = x  # type: ignore[assignment]
    return x + part.weight.detach()


def test_write_to_a_tensor_that_the_child_keeps_is_refused() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x.clone()
        y = root.child(h)
        h.mul_(2)
        return y * root.weight

    with pytest.raises(FrameError, match=r"'child' kept a tensor .* written to in place later"):
        run_divided(Part(body, child=Part(_keeping)), [data()])


def test_childs_write_to_what_it_returned_earlier_is_refused() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        if hasattr(part, "kept"):
            part.kept.add_(1)
        part.__dict__["kept"] = x + part.weight.detach()
        return part.kept

    def body(root: Part, x: torch.Tensor) -> Any:
        return root.child(x), root.child(x) * root.weight

    with pytest.raises(FrameError, match="kept a tensor"):
        run_divided(Part(body, child=Part(child)), [data()])


@pytest.mark.parametrize("change", ["requires_grad_", "detach_"])
def test_changing_whether_an_argument_needs_a_gradient_is_refused(change: str) -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        getattr(x, change)()
        return x * part.weight

    model = Part(lambda m, x: m.child(x * m.weight if change == "detach_" else x * 2), child=Part(child))
    with pytest.raises(FrameError, match="requires_grad_"):
        run_divided(model, [data()])


def test_writes_through_three_ranks() -> None:
    def inner(part: Part, x: torch.Tensor) -> Any:
        x.mul_(part.weight)
        return x

    def middle(part: Part, x: torch.Tensor) -> Any:
        x.add_(part.weight)
        part.third(x)
        return x[:1], x

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        row, same = root.child(h)
        row.mul_(3)
        return h + same

    assert_exact(Part(body, child=Part(middle, third=Part(inner))), data())


def test_hook_inside_a_child_sees_the_gradient_of_a_view_that_it_returns() -> None:
    seen = []

    def child(part: Part, x: torch.Tensor) -> Any:
        row = x[0]
        row.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
        return row * 1 if part.weight is None else row

    assert_exact(Part(lambda m, x: m.child(x * m.weight), child=Part(child)), data())
    torch.testing.assert_close(seen[0], seen[1])


def test_sum_of_all_is_exact_over_two_steps() -> None:
    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> Any:
        for _ in range(2):
            backward(weighted_sum(model(*inputs)))

    assert_exact(Part(lambda m, x: m.child(x * m.weight), child=Part(times_weight)), data(), step=step)
