"""One rank of a job that runs one step of a small GPT-2 on a device and saves the gradients that the rank owns."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy
import shardwright as smp
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def build(device: str) -> tuple[GPT2LMHeadModel, torch.Tensor]:
    """The model and its batch, the same wherever they are built."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(config).eval()
    return model.to(device), torch.randint(64, (8, 32)).to(device)


@smp.step
def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def main(device: str, folder: Path) -> None:
    smp.init({"microbatches": 4})
    model, ids = build(device)
    distributed = smp.DistributedModel(model)
    loss = train_step(distributed, ids)
    gradients = {
        name: parameter.grad.cpu().numpy()
        for name, parameter in distributed.local_named_parameters()
        if parameter.grad is not None
    }
    where = {parameter.device.type for parameter in distributed.local_parameters()}
    assert where == {device}, f"parameters are on {where}"
    numpy.savez(folder / f"rank{smp.rank()}.npz", loss=loss.reduce_mean().cpu().numpy(), **gradients)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
