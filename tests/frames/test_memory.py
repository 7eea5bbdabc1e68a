"""Rule 9: activations and gradients are freed as backward passes through them, by reference counts alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.frames.comparing import Part, data, run_divided, times_weight, weighted_sum

LENGTH = 6


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """Only references count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watch:
    """How many of the tensors noted are alive at certain moments."""

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive: list[int] = []

    def note(self, tensor: torch.Tensor) -> None:
        holder = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
        self.tensors.append(holder)  # type: ignore[arg-type]

    def count(self) -> None:
        self.alive.append(sum(not one.expired() for one in self.tensors))  # type: ignore[attr-defined]


def _chain(watch: Watch) -> Callable[..., Any]:
    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        for _ in range(LENGTH):
            h = root.child(h * h)
            watch.note(h)
        return h

    return body


def _run(model: Part, watch: Watch, count_in: str) -> None:
    from shardwright.execution.backward import ServerBackward

    original = ServerBackward.backward

    def backward(self: Any, calls: Any) -> Any:
        if self._frame.request is None:
            watch.count()
        return original(self, calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerBackward, "backward", backward)
        run_divided(model, [data()], step=lambda model, backward, inputs: backward(weighted_sum(model(*inputs))))
    assert count_in


def test_boundary_activations_are_freed_as_backward_passes() -> None:
    watch = Watch()
    _run(Part(_chain(watch), child=Part(times_weight)), watch, "backward")
    # Each result is saved by the product behind it, the last by the loss.
    assert watch.alive == list(range(LENGTH - 1, -1, -1))


def test_what_only_the_loss_needs_is_freed_before_the_first_wait() -> None:
    watch = Watch()

    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> Any:
        y = model.child(inputs[0] * model.weight).log_softmax(-1)
        watch.note(y)
        loss = -(y * y).sum()
        del y
        backward(loss)
        return loss

    from shardwright.execution.backward import ServerBackward

    original = ServerBackward.backward

    def remote(self: Any, calls: Any) -> Any:
        watch.count()
        return original(self, calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerBackward, "backward", remote)
        run_divided(Part(times_weight, child=Part(times_weight)), [data()], step=step)
    assert watch.alive == [0]


def test_nothing_of_a_step_is_alive_after_it() -> None:
    watch = Watch()

    def child(part: Part, x: torch.Tensor) -> Any:
        y = part.third((x * part.weight).tanh())
        watch.note(x)
        watch.note(y)
        return y

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        h.register_hook(lambda gradient: watch.note(gradient))
        y = root.child(h)
        watch.note(h)
        watch.note(y)
        return root.child(y) + h

    run_divided(
        Part(body, child=Part(child, third=Part(times_weight))),
        [data()],
        step=lambda model, backward, inputs: backward(weighted_sum(model(*inputs))),
    )
    watch.count()
    assert len(watch.tensors) > 6
    assert watch.alive == [0]


def test_nothing_of_a_step_without_backward_is_alive_after_it() -> None:
    watch = Watch()

    def child(part: Part, x: torch.Tensor) -> Any:
        y = (x * part.weight).tanh()
        watch.note(y)
        return y

    def step(model: Any, backward: Any, inputs: list[torch.Tensor]) -> None:
        watch.note(model(*inputs))

    run_divided(Part(lambda m, x: m.child(x * m.weight), child=Part(child)), [data()], step=step)
    watch.count()
    assert watch.alive == [0]


def test_argument_of_a_call_is_not_kept_by_the_call() -> None:
    watch = Watch()

    def body(root: Part, x: torch.Tensor) -> Any:
        h = x + root.weight
        y = root.child(h)
        watch.note(h)
        del h
        watch.count()
        return y

    run_divided(
        Part(body, child=Part(lambda m, x: x * m.weight)),
        [data()],
        step=lambda model, backward, inputs: backward(weighted_sum(model(*inputs))),
    )
    assert watch.alive == [0]
