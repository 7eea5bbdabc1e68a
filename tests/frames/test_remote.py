"""Tensors whose values come when something uses them: every use, beside the same use of an ordinary tensor."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from shardwright.errors import FrameError
from shardwright.frames import cut, edge_of
from shardwright.frames.cut import EngineCall, owned_by, slot_of
from shardwright.frames.remote import RemoteTensor, bring, is_remote, remote_tensor, when_here
from torch.autograd.graph import Node
from torch.nn import functional
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

Maker = Callable[[torch.Tensor], torch.Tensor]


class Values:
    """A source that counts how often its values were taken."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.taken = values, 0

    def take(self) -> torch.Tensor:
        self.taken += 1
        return self.values.clone()

    def arrived(self, before: Node | None, after: Node | None) -> None:
        assert self.taken == 1


def remote(values: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = remote_tensor(
        list(values.shape), list(values.stride()), values.dtype, values.device, Values(values)
    )
    return made


FIVE = torch.arange(5)
SIX = torch.arange(6.0) - 2
TWO = torch.tensor(2)


def written(tensor: torch.Tensor) -> torch.Tensor:
    tensor[1] = 7
    return tensor.mul_(2)


def saved(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"a": tensor}, file)
    file.seek(0)
    return torch.load(file)["a"]


USES: dict[str, Callable[[Maker], Any]] = {
    "an operation": lambda t: t(SIX) * 2,
    "with itself": lambda t: (lambda x: x * x + x)(t(SIX)),
    "in a list": lambda t: torch.stack([t(SIX), t(SIX)]),
    "foreach": lambda t: torch._foreach_add([t(SIX), t(SIX)], 1),
    "function": lambda t: functional.layer_norm(t(SIX).view(2, 3), (3,)),
    "matrix product": lambda t: t(SIX).view(2, 3) @ t(SIX).view(3, 2),
    "as an index": lambda t: FIVE[t(TWO)],
    "as a slice": lambda t: FIVE[t(TWO) :],
    "as a size": lambda t: torch.zeros(t(TWO), t(TWO)),
    "as sizes": lambda t: SIX.reshape([t(TWO), 3]),
    "own size": lambda t: t(SIX).view(t(TWO), 3),
    "as a range": lambda t: (torch.arange(t(TWO)), list(range(t(TWO)))),
    "as a number": lambda t: torch.ones(2).add(1, alpha=t(TWO)),
    "fill": lambda t: torch.full((2,), t(TWO)),
    "of numbers": lambda t: torch.tensor([t(TWO), t(TWO)]),
    "two results": lambda t: torch.topk(t(SIX), t(TWO)),
    "views": lambda t: torch.split(t(SIX), t(TWO)),
    "condition": lambda t: [1 if t(TWO) == 2 else 0, bool(t(TWO))],
    "membership": lambda t: (t(TWO) in [1, 2], 2.0 in t(SIX)),
    "iteration": lambda t: list(t(SIX)),
    "numbers": lambda t: (float(t(TWO)), t(TWO).item(), t(SIX).tolist()),
    "text": lambda t: f"{t(TWO):.1f} {t(TWO)} {t(SIX)!r}",
    "numpy": lambda t: (t(SIX).numpy(), np.asarray(t(SIX)), np.mean(t(SIX).numpy())),
    "written to": lambda t: written(t(SIX)),
    "out": lambda t: torch.add(torch.ones(6), 1, out=t(SIX)),
    "copied into another": lambda t: torch.zeros(6).copy_(t(SIX)),
    "another dtype": lambda t: (t(SIX).to(torch.float64), t(SIX).type(), t(SIX).half()),
    "like it": lambda t: (torch.empty_like(t(SIX)).shape, t(SIX).new_zeros(2)),
    "copies": lambda t: (copy.copy(t(SIX)), copy.deepcopy(t(SIX)), t(SIX).clone(), t(SIX).detach()),
    "pickle": lambda t: pickle.loads(pickle.dumps(t(SIX))),
    "saved": lambda t: saved(t(SIX)),
    "memory": lambda t: (t(SIX).untyped_storage().nbytes(), t(SIX).data.sum(), t(SIX).is_shared()),
    "dlpack": lambda t: torch.from_dlpack(t(SIX)),
    "vmap": lambda t: torch.vmap(lambda x: x * 2)(t(SIX)),
    "functional gradient": lambda t: torch.func.grad(lambda x: x.square().sum())(t(SIX)),
    "checkpoint": lambda t: checkpoint(torch.sin, t(SIX), use_reentrant=False),
    "compiled": lambda t: torch.compile(lambda x: x * 2, backend="eager")(t(SIX)),
    "description": lambda t: (t(SIX).shape, t(SIX).dtype, len(t(SIX)), t(SIX).stride(), t(SIX).is_contiguous()),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_gives_what_an_ordinary_tensor_gives(use: str) -> None:
    expected, found = USES[use](torch.clone), USES[use](remote)
    assert str(found) == str(expected)
    tree_map(lambda leaf: pytest.fail("a result is remote") if isinstance(leaf, RemoteTensor) else leaf, found)


def test_it_says_what_it_is_like_without_its_values_and_is_an_ordinary_tensor_afterwards() -> None:
    tensor = remote(SIX.view(2, 3).t())
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == ((3, 2), (1, 3), SIX.dtype, SIX.device)
    assert (tensor.dim(), tensor.numel(), len(tensor), tensor.requires_grad, tensor.grad_fn) == (2, 6, 3, False, None)
    assert is_remote(tensor)
    also = tensor
    tensor.add_(1)
    assert also is tensor
    assert type(tensor) is torch.Tensor
    assert torch.equal(tensor, SIX.view(2, 3).t() + 1)


def test_gradients_reach_the_cut_before_and_after_the_values_are_here() -> None:
    tensor, slot = cut(remote(SIX), "a result")
    edge = edge_of(tensor)
    assert edge is not None
    assert slot_of(owned_by(edge.node)) is slot
    assert is_remote(tensor)
    with EngineCall():
        torch.autograd.backward((tensor.square() * 3).sum())
    assert slot.gradient is not None
    assert torch.equal(slot.gradient, 6 * SIX)


def test_what_native_code_saves_is_the_same_tensor() -> None:
    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(given)
            return given.square()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (given,) = ctx.saved_tensors
            return 2 * given * gradient

    def squared(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = Saving.apply(given) * weight  # type: ignore[no-untyped-call]
        return product

    for requires_grad in (True, False):
        made = remote(SIX)
        tensor, slot = cut(made, "a result") if requires_grad else (made, None)
        weight = torch.ones(6, requires_grad=True)
        with EngineCall():
            torch.autograd.backward(checkpoint(squared, tensor, weight, use_reentrant=False).sum())
        assert torch.equal(weight.grad, SIX.square())  # type: ignore[arg-type]
        if slot is not None:
            assert slot.gradient is not None
            assert torch.equal(slot.gradient, 2 * SIX)


def test_native_code_that_writes_first_is_refused() -> None:
    with (
        torch._C.DisableTorchFunctionSubclass(),  # as native code goes past it
        pytest.raises(FrameError, match="native code wrote to a result of a module on another rank"),
    ):
        torch.relu_(remote(SIX))


def test_what_waits_for_the_values_is_done_once() -> None:
    done: list[torch.Tensor] = []
    tensor = remote(SIX)
    when_here(tensor, done.append)
    assert not done
    bring([tensor, {"again": tensor}])
    assert len(done) == 1
    assert done[0] is tensor
    when_here(tensor, done.append)
    assert len(done) == 2


def test_what_waits_for_the_values_is_done_when_native_code_comes_first() -> None:
    done: list[torch.Tensor] = []
    tensor = remote(SIX)
    when_here(tensor, done.append)
    with torch._C.DisableTorchFunctionSubclass():
        torch.sin(tensor)
    assert len(done) == 1
    assert torch.equal(tensor + 0, SIX)
    assert len(done) == 1
