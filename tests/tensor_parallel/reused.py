"""A rank of a job whose divided modules have several names: state dicts are those of the plain model.

``reused.py PP``; the tensor parallelism degree is 2.
"""

from __future__ import annotations

import copy
import sys

import shardwright as smp
import torch
from saved import same
from torch import nn

WIDTH = 8


class Block(nn.Module):
    """A divided layer in one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()


def main() -> None:
    pipeline = int(sys.argv[1])
    torch.set_default_dtype(torch.float64)
    smp.init(
        {"pipeline_parallel_degree": pipeline, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
        | ({"auto_partition": False, "default_partition": 0} if pipeline > 1 else {})
    )
    torch.manual_seed(3)
    layer, block, plain = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)
    net = nn.Sequential(layer, nn.Tanh(), block, plain, layer, block, plain)
    whole = copy.deepcopy(net)
    for module in (layer, block.inner):
        smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(net)
    assert [one.substitute for one in model.tensor_parallelism_report()] == ["DistributedLinear"] * 2
    if pipeline > 1:
        smp.set_partition(model.module[2], 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    same(model.state_dict(), whole.state_dict(), 0.0)

    @smp.step
    def train(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def step() -> None:
        x = torch.randn(4, WIDTH)
        optimizer.zero_grad()
        reference.zero_grad()
        train(model, x)
        whole(x).square().mean().backward()
        optimizer.step()
        reference.step()

    step()
    state = {name: one.clone() for name, one in model.state_dict().items()}
    same(state, whole.state_dict())
    assert list(state) == list(whole.state_dict())
    whole.load_state_dict(state)
    doubled = {name: 2 * value for name, value in whole.state_dict().items()}
    for given in (doubled, state):
        assert model.load_state_dict(given) == ([], [])
        same(model.state_dict(), given, 0.0)
    assert model.load_state_dict(model.local_state_dict()) == ([], [])
    averaged = smp.AveragedModel(model)
    same({name.removeprefix("module."): one for name, one in averaged.state_dict().items() if "." in name}, state, 0.0)
    step()
    same(model.state_dict(), whole.state_dict())
    print("saved")


if __name__ == "__main__":
    main()
