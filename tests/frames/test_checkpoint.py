"""Rule 15: a checkpoint around modules on other ranks makes those ranks checkpoint them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from shardwright.execution.context import saved_tensor_hooks_are_set
from shardwright.frames.checkpointing import OF_THE_SCRIPT
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.frames.comparing import WIDTH, Part, assert_exact, data, run_divided, times_weight, weighted_sum
from tests.frames.loopback import LoopbackJob, guarded

KINDS = [False, True]


def _counting(runs: list[str], name: str) -> Any:
    def body(part: Part, x: torch.Tensor) -> Any:
        runs.append(name)
        return (x * part.weight).tanh()

    return body


@pytest.mark.parametrize("reentrant", KINDS)
def test_checkpoint_around_a_child(reentrant: bool) -> None:
    runs: list[str] = []

    def body(root: Part, x: torch.Tensor) -> Any:
        return checkpoint(root.child, x * root.weight, use_reentrant=reentrant)

    compared = assert_exact(Part(body, child=Part(_counting(runs, "child"))), data())
    assert compared.job.server.kinds == ["forward", "backward"]
    assert compared.job.server.requests[0].forward.context.checkpointing
    assert runs == ["child"] * 4


@pytest.mark.parametrize("reentrant", KINDS)
def test_checkpoint_around_code_with_several_children(reentrant: bool) -> None:
    def block(root: Part, h: torch.Tensor) -> Any:
        return root.child(h) * h + root.other(h.tanh())

    def body(root: Part, x: torch.Tensor) -> Any:
        return checkpoint(partial(block, root), x * root.weight, use_reentrant=reentrant)

    assert_exact(Part(body, child=Part(times_weight), other=Part(times_weight)), data())


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("inside", KINDS)
def test_checkpoint_of_a_module_that_checkpoints_a_part_of_itself(reentrant: bool, inside: bool) -> None:
    """What runs again in backward must save the same tensors as it did in the forward."""

    def child(part: Part, x: torch.Tensor) -> Any:
        return checkpoint(part.part, (x * part.weight).tanh(), use_reentrant=inside)

    def body(root: Part, x: torch.Tensor) -> Any:
        return checkpoint(root.child, x * root.weight, use_reentrant=reentrant)

    assert_exact(Part(body, child=Part(child, part=Part(times_weight))), data())


@pytest.mark.parametrize("reentrant", KINDS)
def test_checkpoint_goes_on_into_modules_that_span_ranks(reentrant: bool) -> None:
    runs: list[str] = []

    def child(part: Part, x: torch.Tensor) -> Any:
        runs.append("child")
        return part.third(x * part.weight)

    def body(root: Part, x: torch.Tensor) -> Any:
        return checkpoint(root.child, x * root.weight, use_reentrant=reentrant)

    compared = assert_exact(Part(body, child=Part(child, third=Part(_counting(runs, "third")))), data())
    assert [request.forward.context.checkpointing for request in compared.job.server.requests[:2]] == [
        OF_THE_SCRIPT
    ] * 2
    assert runs[-3:] == ["child", "third", "third"]


@pytest.mark.parametrize("reentrant", KINDS)
def test_checkpoint_around_a_whole_local_module_between_calls(reentrant: bool) -> None:
    runs: list[str] = []

    def body(root: Part, x: torch.Tensor) -> Any:
        h = root.child(x * root.weight)
        return root.child(checkpoint(root.local, h, use_reentrant=reentrant))

    assert_exact(Part(body, child=Part(times_weight), local=Part(_counting(runs, "local"))), data())
    assert runs == ["local"] * 4


@pytest.mark.parametrize("reentrant", KINDS)
def test_checkpoint_inside_a_whole_child(reentrant: bool) -> None:
    runs: list[str] = []

    def child(part: Part, x: torch.Tensor) -> Any:
        return checkpoint(part.inner, x * part.weight, use_reentrant=reentrant)

    model = Part(lambda m, x: m.child(x * m.weight), child=Part(child, inner=Part(_counting(runs, "inner"))))
    assert_exact(model, data())
    assert runs == ["inner"] * 4


def test_checkpointed_run_of_layers_checkpoints_each() -> None:
    runs: list[str] = []
    layers = nn.Sequential(nn.Linear(3, 3).double(), Part(_counting(runs, "middle")), nn.Linear(3, 3).double())
    model = Part(lambda m, x: checkpoint(m.layers, x * m.weight, use_reentrant=False), layers=layers)
    compared = assert_exact(model, data(), owners=lambda name: int(name.startswith("layers.")))
    assert compared.job.server.requests[0].forward.context.checkpointing
    assert compared.job.server.requests[0].forward.range == (0, 3)
    assert runs == ["middle"] * 4


def test_dropout_is_the_same_when_computed_again() -> None:
    masks: list[torch.Tensor] = []

    def child(part: Part, x: torch.Tensor) -> Any:
        y = torch.dropout(x * part.weight, 0.5, True)
        masks.append(y.detach() == 0)
        torch.rand(3)
        return y.tanh()

    model = Part(lambda m, x: checkpoint(m.child, x * m.weight, use_reentrant=False), child=Part(child))
    run_divided(model, [data(40, 3)], step=lambda m, backward, inputs: backward(weighted_sum(m(*inputs))))
    first, again = masks
    assert torch.equal(first, again)


def test_failure_inside_a_checkpoint_leaves_no_hooks_behind() -> None:
    def child(part: Part, x: torch.Tensor) -> Any:
        if fail:
            raise ValueError("inside")
        return x * part.weight

    def body(root: Part, x: torch.Tensor) -> Any:
        return checkpoint(root.local, root.child(x), use_reentrant=False)

    fail = True
    model = Part(body, child=Part(times_weight), local=Part(child))
    job = LoopbackJob(model, lambda name: int("child" in name))
    with guarded():
        for _ in range(3):
            with pytest.raises(ValueError, match="inside"):
                job.run(lambda backward: model(data()))
        fail = False
        job.run(lambda backward: backward(weighted_sum(model(data()))))
    assert not saved_tensor_hooks_are_set()
    assert job.live_frames == 0


@pytest.mark.parametrize("rows", [2, 400])
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("twice", [False, True])
def test_checkpoint_around_a_child_that_begins_with_an_activation_in_place(
    reentrant: bool, twice: bool, rows: int
) -> None:
    """The script's checkpoint computes again what the child writes to; the child's own one begins behind that."""

    def block(root: Part, x: torch.Tensor) -> Any:
        h = x * root.weight
        return root.child(h, h if twice else None)

    def child(part: Part, h: torch.Tensor, other: torch.Tensor | None) -> Any:
        torch.relu_(h)
        return (h * part.weight).tanh() + (0 if other is None else other * 2)

    def body(root: Part, x: torch.Tensor) -> Any:
        return checkpoint(partial(block, root), x, use_reentrant=reentrant)

    assert_exact(Part(body, child=Part(child)), data(rows, WIDTH, needs_gradient=True))


@pytest.mark.parametrize("rows", [2, 400])
@pytest.mark.parametrize("reentrant", KINDS)
def test_arguments_lie_the_same_way_when_a_child_is_computed_again(reentrant: bool, rows: int) -> None:
    """A linear layer multiplies in one kernel or in two, as its argument lies, and saves other tensors for backward."""

    def child(part: Part, h: torch.Tensor) -> Any:
        return torch.nn.functional.linear(h, part.weight * torch.eye(WIDTH, dtype=h.dtype), part.weight.tanh())

    def body(root: Part, x: torch.Tensor) -> Any:
        h = (x * root.weight).sum(0, keepdim=True).unsqueeze(0)
        return checkpoint(root.child, h.expand(1, rows, WIDTH), use_reentrant=reentrant)

    assert_exact(Part(body, child=Part(child)), data(rows, WIDTH, needs_gradient=True))
