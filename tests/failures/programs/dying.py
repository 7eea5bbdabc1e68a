"""Rank 2 of four is killed where gradients are finished; whoever hears of it says what, and leaves in good order."""

from __future__ import annotations

import os
import signal

import shardwright as smp
import torch
from common import say
from torch import nn


def main() -> None:
    smp.init(
        {"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2, "auto_partition": False, "default_partition": 0}
    )
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    armed = False

    def die(parameter: torch.Tensor) -> None:
        if armed and smp.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(die)

    @smp.step
    def train(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().mean()
        model.backward(loss)
        return loss

    train(model, torch.ones(4, 8))
    armed = True
    try:
        train(model, torch.ones(4, 8))
    except smp.PeerLostError as error:
        say("lost", rank=error.rank, text=str(error))


if __name__ == "__main__":
    main()
