"""Rules 3, 7 and 19: which values cross and how, and the modes that go with a request."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shardwright import register_type
from shardwright.errors import FrameError, UnsupportedValueError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tests.frames.comparing import Compared, Part, assert_exact, data, run_divided, times_weight, weighted_sum


@register_type
@dataclasses.dataclass
class Pair:
    """A registered type."""

    one: torch.Tensor
    count: int = 0


class Unknown:
    """Not registered."""


def test_result_of_any_known_kind() -> None:
    def child(part: Part, x: torch.Tensor, *, mask: torch.Tensor, name: str = "default") -> Any:
        y = x * part.weight
        return {"pair": Pair(y, 3), "mask": mask, name: (y.sum(), None, [1, 2.5, "text"]), "shape": y.shape}

    def body(root: Part, x: torch.Tensor) -> Any:
        return root.child(x * root.weight, mask=x.detach().sum(1) > 0)

    assert_exact(Part(body, child=Part(child)), data())


def test_nothing_need_come_back() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        assert root.child(x * root.weight) is None
        return x * root.weight

    compared = assert_exact(Part(body, child=Part(lambda m, x: None)), data())
    assert compared.job.server.kinds == ["forward"]


def test_result_without_gradient_keeps_no_frame() -> None:
    def body(root: Part, x: torch.Tensor) -> Any:
        return x * root.weight * root.child(x * root.weight)

    compared = assert_exact(Part(body, child=Part(lambda m, x: (x * m.weight).detach() + 1)), data())
    assert compared.job.server.kinds == ["forward"]


def test_argument_of_unknown_type_is_named_by_its_path() -> None:
    model = Part(lambda m, x: m.child(x, mask=[{"deep": Unknown()}]), child=Part(lambda m, x, mask: x * m.weight))
    with pytest.raises(UnsupportedValueError, match=r"Unknown stands at kwargs\['mask'\]\[0\]\['deep'\]"):
        run_divided(model, [data()])


def test_result_of_unknown_type_is_named_by_its_path() -> None:
    model = Part(lambda m, x: m.child(x)[0], child=Part(lambda m, x: (x * m.weight, Unknown())))
    with pytest.raises(UnsupportedValueError, match=r"Unknown stands at the result of child\[1\]"):
        run_divided(model, [data()])


CHANGES = {
    "list": ([1, 2], lambda given: given.append(3)),
    "dict": ({"a": 1}, lambda given: given.update(a=2)),
    "set": ({1}, lambda given: given.add(2)),
    "Pair": (Pair(torch.zeros(1)), lambda given: setattr(given, "count", 1)),
    "inner": (([{"a": [1]}],), lambda given: given[0][0]["a"].clear()),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_container_is_refused(kind: str) -> None:
    value, change = CHANGES[kind]

    def child(part: Part, x: torch.Tensor, given: Any) -> Any:
        change(given)
        return x * part.weight

    kind = "list" if kind == "inner" else kind
    with pytest.raises(FrameError, match=rf"'child' changed a {kind} that it was given"):
        run_divided(Part(lambda m, x: m.child(x, value), child=Part(child)), [data()])


def test_containers_that_are_only_read_cross() -> None:
    def child(part: Part, x: torch.Tensor, given: Any) -> Any:
        return x * part.weight * given["a"][0] + sum(given["b"])

    def body(root: Part, x: torch.Tensor) -> Any:
        return root.child(x, {"a": [x * root.weight], "b": {1, 2}})

    assert_exact(Part(body, child=Part(child)), data())


def test_strides_of_dense_tensors_travel_both_ways() -> None:
    seen = []

    def child(part: Part, x: torch.Tensor) -> Any:
        seen.append(x.stride())
        return (x * part.weight).clone().t().contiguous().t()

    def body(root: Part, x: torch.Tensor) -> Any:
        y = root.child((x * root.weight).t().contiguous().t())
        seen.append(y.stride())
        return y.t().view(-1)

    assert_exact(Part(body, child=Part(child)), data())
    assert seen == [(1, 2)] * 4


@pytest.mark.parametrize("view", ["narrow", "expand", "step", "diagonal"])
def test_arguments_with_gaps_or_overlap_are_exact(view: str) -> None:
    views = {
        "narrow": lambda t: t[:, :2],
        "expand": lambda t: t[:1].expand(2, 3),
        "step": lambda t: t[::2, ::2],
        "diagonal": lambda t: t.diagonal(),
    }

    def body(root: Part, x: torch.Tensor) -> Any:
        return root.child(views[view](x * root.weight))

    assert_exact(Part(body, child=Part(lambda m, x: (x * m.weight.sum(), x[:1]))), data(3, 3))


def test_reshaping_tensors_with_gaps_copies_wherever_it_is_done() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        x.reshape(-1).mul_(2)  # a copy, because x has gaps
        return (x * part.weight[:2]).clone(), torch.ones(3, 3, dtype=x.dtype).mul(part.weight)[:, :2]

    def body(root: Part, x: torch.Tensor) -> Any:
        y, gaps = root.child((x * root.weight)[:, :2])
        gaps.reshape(-1).add_(1)
        assert not gaps.is_contiguous()
        return y, gaps

    assert_exact(Part(body, child=Part(child)), data(3, 3))


def test_write_to_an_argument_with_gaps_comes_back() -> None:
    def child(part: Part, x: torch.Tensor) -> None:
        x.mul_(part.weight[:2])

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        root.child(h[:, :2])
        return h

    assert_exact(Part(body, child=Part(child)), data(3, 3))


def test_grad_mode_goes_with_the_request() -> None:
    seen = []

    def child(part: Part, x: torch.Tensor) -> Any:
        seen.append(torch.is_grad_enabled())
        with torch.enable_grad():
            y = x * part.weight
        return y, x * part.weight

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        with torch.no_grad():
            return root.child(h)

    assert_exact(Part(body, child=Part(child)), data())
    assert seen == [False, False]


def test_view_given_under_no_grad_keeps_its_gradient() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            return x * part.weight

    def body(root: Part, x: torch.Tensor) -> Any:
        view = (x * root.weight)[0]
        with torch.no_grad():
            return root.child(view)

    assert_exact(Part(body, child=Part(child)), data())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_without_gradients(mode: Any) -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        return part.third(x * part.weight)

    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> Any:
        with mode():
            return model(*inputs)

    model = Part(lambda m, x: m.child(x * m.weight), child=Part(child, third=Part(times_weight)))
    assert assert_exact(model, data(), step=step).job.server.kinds == ["forward", "forward"]


def test_autocast_goes_with_the_request_and_ends_with_it() -> None:
    seen: list[torch.dtype] = []

    def child(part: Part, x: torch.Tensor) -> Any:
        y = x @ part.weight.float().diag()
        seen.append(y.dtype)
        return y

    def body(root: Part, x: torch.Tensor) -> Any:
        h = (x * root.weight).float()
        with torch.autocast("cpu", torch.bfloat16):
            y = root.child(h)
        return y.double(), root.child(h).double()

    assert_exact(Part(body, child=Part(child)), data())
    assert seen == [torch.bfloat16, torch.float32] * 2


def test_autocast_casts_of_another_task_are_not_used() -> None:
    """A cast made without gradients, by a task that waits, must not stand for a weight where gradients are needed."""

    def child(part: Part, x: torch.Tensor) -> Any:
        with torch.no_grad():
            part.linear(x)
            y = part.back(x)  # waits, while the next task runs on this rank
        return y + x

    def body(root: Part, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return root.child(x.float()).float().sum() + (x * root.weight).sum()

    linear = torch.nn.Linear(3, 3)
    cleared = []
    original = torch.clear_autocast_cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "clear_autocast_cache", lambda: (cleared.append(1), original()))
        run_divided(Part(body, child=Part(child, linear=linear, back=Part(times_weight))), [data()])
    assert len(cleared) >= 2


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets the default dtype for the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_settings_changed_in_the_step_go_with_the_request() -> None:
    seen: list[Any] = []

    def child(part: Part, x: torch.Tensor) -> Any:
        seen.append((torch.zeros(1).dtype, torch.backends.cuda.math_sdp_enabled()))
        return x * part.weight

    def body(root: Part, x: torch.Tensor) -> Any:
        with default_dtype(torch.float64), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = root.child(x)
        return root.child(y * root.weight)

    assert_exact(Part(body, child=Part(child)), data())
    assert seen == [(torch.float64, False), (torch.float32, True)] * 2
    assert torch.get_default_dtype() == torch.float32


def test_settings_that_a_child_leaves_changed_do_not_reach_its_caller() -> None:
    seen = []

    def child(part: Part, x: torch.Tensor) -> Any:
        torch.set_default_dtype(torch.float64)
        return x * part.weight

    def body(root: Part, x: torch.Tensor) -> Any:
        y = root.child(x)
        seen.append(torch.get_default_dtype())
        return y

    run_divided(Part(body, child=Part(child)), [data()])
    torch.set_default_dtype(torch.float32)
    assert seen == [torch.float32]


def test_default_device_goes_with_the_request() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        return x * part.weight, str(torch.zeros(1).device)

    def body(root: Part, x: torch.Tensor) -> Any:
        with torch.device("meta"):
            y, device = root.child(x)
        return y * root.weight, device, root.child(x)[1]

    assert assert_exact(Part(body, child=Part(child)), data()).result[1:] == ("meta", "cpu")


def test_torch_function_mode_around_a_call_is_refused() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    def body(root: Part, x: torch.Tensor) -> Any:
        with Mode():
            return root.child(x)

    with pytest.raises(FrameError, match="was called under the torch function mode Mode"):
        run_divided(Part(body, child=Part(times_weight)), [data()])


_variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def test_context_variables_of_the_script_reach_modules() -> None:
    token = _variable.set(5)
    try:
        child = Part(lambda m, x: x * m.weight * _variable.get())
        assert_exact(Part(lambda m, x: m.child(x), child=child), data())
    finally:
        _variable.reset(token)


def _dropped(seed: int, before: int) -> Compared:
    """Two microbatches with dropout, after other random numbers have been drawn."""
    torch.manual_seed(1)
    model = Part(
        lambda m, x: torch.dropout(m.child(torch.dropout(x, 0.5, True)), 0.5, True),
        child=Part(lambda m, x: torch.dropout(x * m.weight, 0.5, True)),
    )
    x = data(50, 3)
    torch.manual_seed(seed)

    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> Any:
        result = model(*inputs)
        torch.rand(before)
        second = model(*inputs)
        return result.detach(), second.detach()

    return run_divided(model, [x], step=step)


def test_random_numbers_depend_on_the_seed_and_the_call_only() -> None:
    first, again, drawn = _dropped(3, 0), _dropped(3, 0), _dropped(3, 7)
    other = _dropped(4, 0)
    assert torch.equal(first.result[0], again.result[0])
    assert not torch.equal(first.result[0], first.result[1])
    assert not torch.equal(first.result[0], other.result[0])
    child_masks = [(run.result[1] == 0).sum() for run in (first, drawn)]
    assert all(count > 0 for count in child_masks)


def test_random_numbers_of_a_task_do_not_depend_on_what_others_drew() -> None:
    drawn: dict[int, list[torch.Tensor]] = {}

    def run(noise: int) -> None:
        def child(part: Part, x: torch.Tensor) -> Any:
            drawn.setdefault(noise, []).append(torch.rand(2))
            torch.rand(noise)
            return x * part.weight

        def body(root: Part, x: torch.Tensor) -> Any:
            before = torch.rand(2)
            y = root.child(x)
            drawn[noise] += [before, torch.rand(2)]
            torch.rand(noise)  # the child's second call draws the same all the same
            return root.child(y)

        torch.manual_seed(0)
        model = Part(body, child=Part(child))
        torch.manual_seed(0)
        run_divided(model, [data()], step=lambda model, backward, inputs: backward(weighted_sum(model(*inputs))))

    run(1)
    run(5)
    assert all(torch.equal(one, other) for one, other in zip(drawn[1], drawn[5], strict=True))
