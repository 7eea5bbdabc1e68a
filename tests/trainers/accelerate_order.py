"""The order of samples of accelerate: ``FOLDER 0`` saves and goes on, ``FOLDER 1`` goes on in another process.

The last line of output has the samples of this rank after the save.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import shardwright as smp
import torch
from accelerate.data_loader import skip_first_batches
from shardwright.accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Save in the middle of the second epoch, and after it; or load, and go on from there."""
    folder, resumed = sys.argv[1], sys.argv[2] == "1"
    smp.init({"ddp": True})
    torch.manual_seed(99 if resumed else 1)
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.arange(24.0)), batch_size=3, shuffle=True)
    _, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    def read(batches: Any) -> list[list[float]]:
        return [batch.tolist() for (batch,) in batches]

    if resumed:
        accelerator.load_state(f"{folder}/middle")
        middle = read(skip_first_batches(loader, 2))
        accelerator.load_state(f"{folder}/end")
    else:
        read(loader)
        middle = []
        for number, (batch,) in enumerate(loader):
            if number >= 2:
                middle.append(batch.tolist())
            if number == 1:
                accelerator.save_state(f"{folder}/middle")
        accelerator.save_state(f"{folder}/end")
    print(json.dumps([middle, read(loader), read(loader)]))
    smp.shutdown()


if __name__ == "__main__":
    main()
