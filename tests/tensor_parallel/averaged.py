"""A rank of a pipeline with tensor parallelism: weights are averaged as torch averages those of one process."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from divided import initialized
from saved import Net, data, same
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

EXACT = 1e-12
WAYS: list[dict[str, Any]] = [
    {},
    {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    {"avg_fn": get_ema_avg_fn(0.5), "use_buffers": True},
]


@smp.step
def train(model: Any, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = (model(ids) - y).square().mean()
    model.backward(loss)
    return loss


@smp.step
def predict(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids)


def check(how: dict[str, Any]) -> None:
    model, whole = smp.DistributedModel(Net(divided=True)), initialized(Net(divided=False))
    model.load_state_dict(whole.state_dict())
    ours, theirs = smp.AveragedModel(model, **how), AveragedModel(whole, **how)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    same(ours.state_dict(), theirs.state_dict(), EXACT)
    replicas = range(smp.dp_size())

    def step(number: int) -> None:
        optimizer.zero_grad()
        reference.zero_grad()
        train(model, *data(number, smp.dp_rank()))
        of_all = [(whole(ids) - y).square().mean() for ids, y in (data(number, r) for r in replicas)]
        torch.stack(of_all).mean().backward()
        optimizer.step()
        reference.step()
        for _, buffer in (*model.local_named_buffers(), *whole.named_buffers()):
            buffer.fill_(1.0 + number)

    def update() -> None:
        ours.update_parameters()
        theirs.update_parameters(whole)

    for number in range(3):
        step(number)
        update()
        same(ours.state_dict(), theirs.state_dict(), EXACT)
    assert 0 < len(list(model.local_parameters())) < len(list(whole.parameters())), "nothing was divided"
    first = ours.state_dict(gather_to_rank0=True)
    assert bool(first) == (smp.mp_rank() == 0)

    ids = data(9, smp.dp_rank())[0]
    with ours.applied() as averaged, torch.no_grad():
        found = predict(averaged, ids).concat()
        trained = averaged.state_dict()
    same(trained, theirs.module.state_dict(), EXACT)
    if smp.pp_rank() == 0:
        torch.testing.assert_close(found, theirs(ids), rtol=EXACT, atol=EXACT)
        assert (found - whole(ids)).abs().max() > 1e-6, "averages are not told from weights"
    same(model.state_dict(), whole.state_dict(), EXACT)

    # From its own parts, and from torch's state dict: each goes on as the original does.
    part, state = ours.local_state_dict(), theirs.state_dict()
    assert part["_smp_is_partial"]
    for given in (part, state):
        again = smp.AveragedModel(model, **how)
        assert again.load_state_dict(given) == ([], [])
        same(again.state_dict(), state, EXACT)
        same(model.state_dict(), whole.state_dict(), EXACT)
    fresh = AveragedModel(Net(divided=False, seed=3), **how)
    fresh.load_state_dict(ours.state_dict())
    same(fresh.state_dict(), state, EXACT)
    step(3)
    again.update_parameters()
    update()
    same(again.state_dict(), theirs.state_dict(), EXACT)
    same(ours.state_dict(), theirs.state_dict(), EXACT)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    smp.init({"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True, "microbatches": 2})
    for how in WAYS:
        check(how)
        print("averaged")
    smp.shutdown()


if __name__ == "__main__":
    main()
