"""Functions of several results, some of which get no gradient, between modules on other ranks."""

import copy
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


class Both(torch.autograd.Function):
    """Gives two arguments back, and asks for zeros in place of gradients that are not there."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return one * 2, other * 3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        one, other = gradients
        return None if one is None else one * 2, None if other is None else other * 3


class BothOrNone(Both):
    """Leaves out the gradients of what has none."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return one * 2, other * 3


class Hooked(nn.Module):
    """Returns its arguments; its hook leaves their gradients as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda *_: None)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return one, other


class Whole(nn.Module):
    """Uses one of two results, of which one comes from a layer and the other one goes to it again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layer = nn.Linear(8, 8)
        self.hooked = Hooked()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        doubled = x * 2
        one, other = self.layer(doubled), doubled + x  # one engine call cannot stop at both `doubled` and `x`
        if self.kind == "hook":
            _, result = self.hooked(one, other)
        else:
            _, result = (Both if self.kind == "zeros" else BothOrNone).apply(one, other)
        self.layer(result)  # nobody uses this; in backward it puts the two results on different levels
        return result.square() + x


@pytest.mark.parametrize("rows", [4, 400])
@pytest.mark.parametrize("kind", ["hook", "zeros", "none"])
def test_what_gets_no_gradient_gets_zeros_where_plain_torch_gives_them(job: Job, kind: str, rows: int) -> None:
    torch.manual_seed(0)
    whole, inputs = Whole(kind).double(), torch.randn(rows, 8, dtype=torch.float64)

    def main(runtime: Runtime) -> tuple[dict[str, torch.Tensor | None], int]:
        module = copy.deepcopy(whole)
        smp.set_partition(module.layer, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).sum()
            model.backward(loss)
            return loss

        train(inputs)
        gradients = {name: p.grad for name, p in module.named_parameters() if not is_sentinel(p)}
        return gradients, runtime.server.stats()["step"]["sent"]["forward"]

    results = job.run(main, {"auto_partition": False, "default_partition": 0, "microbatches": 1})
    found: dict[str, torch.Tensor | None] = {}
    for result in results:
        assert not isinstance(result, BaseException), result
        found |= result[0]
    assert results[0][1] == 2
    whole(inputs).sum().backward()
    assert (whole.layer.weight.grad is None) == (kind == "none")
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12)
