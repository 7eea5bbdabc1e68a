"""Backwards in two parts: which of torch's nodes may run twice, and that the others run once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.frames.weights import RUN_AGAIN
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn
from torch.autograd.graph import Node
from torch.nn import functional

from tests.frames.job import Job, job_fixture

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: By node: an operation of an input and a weight, and their shapes. Of the largest inputs each has more than 4 KiB.
OPERATIONS: dict[str, list[tuple[Operation, tuple[int, ...], tuple[int, ...]]]] = {
    "Addmm": [
        (lambda x, w: functional.linear(x, w, torch.ones(5, dtype=x.dtype)), (40, 160), (5, 160)),
        (lambda x, w: torch.addmm(w, x, torch.ones(8, 4, dtype=x.dtype)), (6, 8), (4,)),
    ],
    "Baddbmm": [
        (lambda x, w: torch.baddbmm(torch.ones(3, 5, 4, dtype=x.dtype), x, w.expand(3, 8, 4)), (3, 5, 8), (8, 4)),
        (lambda x, w: torch.baddbmm(w, x, torch.ones(3, 8, 4, dtype=x.dtype)), (3, 5, 8), (4,)),
    ],
    "Bmm": [(torch.bmm, (3, 5, 8), (3, 8, 4))],
    "Dot": [(lambda x, w: torch.dot(x[0], w), (6, 8), (8,))],
    "Mm": [(torch.mm, (40, 160), (160, 5))],
    "Mv": [(torch.mv, (40, 160), (160,))],
    "Add": [(torch.add, (3, 8, 6, 6), (8, 1, 1)), (torch.add, (6, 8), (8,))],
    "Cat": [(lambda x, w: torch.cat([w.expand(3, 1, 6, 6), x], 1), (3, 8, 6, 6), (1, 1, 6, 6))],
    "Div": [(torch.div, (3, 8, 6, 6), (8, 1, 1))],
    "Mul": [(torch.mul, (3, 8, 6, 6), (8, 1, 1)), (torch.mul, (6, 8), (8,))],
    "Stack": [(lambda x, w: torch.stack([w.expand_as(x), x]), (3, 8, 6, 6), (8, 1, 1))],
    "Sub": [(torch.sub, (3, 8, 6, 6), (8, 1, 1)), (lambda x, w: w - x, (6, 8), (8,))],
    "Convolution": [
        (functional.conv2d, (3, 8, 6, 6), (4, 8, 3, 3)),
        (lambda x, w: functional.conv2d(x, w, groups=4), (3, 8, 6, 6), (8, 2, 3, 3)),
        (lambda x, w: functional.conv2d(x, w, stride=2, padding=1, dilation=2), (3, 8, 9, 9), (4, 8, 3, 3)),
        (functional.conv_transpose2d, (3, 8, 6, 6), (8, 4, 3, 3)),
        (functional.conv1d, (3, 8, 6), (4, 8, 3)),
    ],
    "NativeLayerNorm": [
        (lambda x, w: functional.layer_norm(x, (160,), w, w), (40, 160), (160,)),
        (lambda x, w: functional.layer_norm(x, (8, 6, 6), w), (3, 8, 6, 6), (8, 6, 6)),
        (lambda x, w: functional.layer_norm(x, (6,), w), (3, 8, 6, 6), (6,)),
    ],
}


def laid(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "contiguous":
        return tensor
    if tensor.dim() == 4:
        return tensor.to(memory_format=torch.channels_last)
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def names_behind(node: Node | None) -> set[str]:
    if node is None:
        return set()
    return {node.name()}.union(*(names_behind(behind) for behind, _ in node.next_functions))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "otherwise"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_nodes_that_run_again_give_each_gradient_alone_as_with_the_other(
    name: str, layout: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    for operation, given, weight in OPERATIONS[name]:
        x = laid(torch.rand(given, dtype=dtype) + 0.5, layout).requires_grad_()
        w = (torch.rand(weight, dtype=dtype) + 0.5).requires_grad_()
        result = operation(x, w)
        assert f"{name}Backward0" in names_behind(result.grad_fn)
        gradient = laid(torch.rand(result.shape, dtype=dtype), layout)
        both = torch.autograd.grad(result, [x, w], gradient, retain_graph=True)
        (of_input,) = torch.autograd.grad(result, [x], gradient, retain_graph=True)
        (of_weight,) = torch.autograd.grad(result, [w], gradient)
        assert torch.equal(of_input, both[0])
        assert torch.equal(of_weight, both[1])


def test_every_node_that_runs_again_is_tried() -> None:
    assert {f"{name}Backward0" for name in OPERATIONS} == RUN_AGAIN


job = job_fixture(2)


class Scaled(nn.Module):
    """A learned slope, a learned scale, and a bilinear form: nodes of several kinds that lead to weights."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.slope = nn.PReLU(channels)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))
        self.form = nn.Bilinear(6, 6, 6)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.slope(value * self.scale)
        return self.form(value, value.tanh())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "normalisation", [lambda: nn.GroupNorm(2, 8), lambda: nn.InstanceNorm2d(8, affine=True), lambda: Scaled(8)]
)
def test_zero_bubble_runs_what_may_not_run_again_once(
    job: Job, normalisation: Callable[[], nn.Module], memory_format: torch.memory_format
) -> None:
    torch.manual_seed(2)
    convolutions = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)]
    layers = [convolutions[0], normalisation(), convolutions[1], normalisation(), convolutions[2]]
    model = nn.Sequential(*layers).double().to(memory_format=memory_format)
    batch = torch.randn(6, 8, 6, 6, dtype=torch.float64).to(memory_format=memory_format)

    plain = copy.deepcopy(model)
    for part in batch.chunk(3):
        plain(part).square().mean().backward()

    def main(runtime: Runtime) -> dict[str, Any]:
        module = copy.deepcopy(model)
        for layer, rank in zip(module, [0, 0, 1, 1, 1], strict=True):
            smp.set_partition(layer, rank)
        divided = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> None:
            divided.backward(divided(part).square().mean())

        train(batch)
        return {name: p.grad for name, p in module.named_parameters() if not is_sentinel(p)}

    settings = {"microbatches": 3, "pipeline": "zero_bubble", "auto_partition": False, "default_partition": 0}
    found: dict[str, Any] = {}
    for result in job.run(main, settings):
        if isinstance(result, BaseException):
            raise result
        found |= result
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad / 3, rtol=1e-10, atol=1e-14, msg=name)
