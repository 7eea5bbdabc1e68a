"""Lightning in jobs with other keys of the configuration: losses of one process, also after a resumed epoch.

usage: python -m tests.trainers.lightning_keys FOLDER CONFIG
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.trainers.lightning_modules import Module, batches_of, made, samples, trainer_of


class Scheduled(Module):
    """Has a scheduler that is created before the strategy wraps the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


def expected() -> list[float]:
    """The losses of three epochs in one process."""
    module = made(Scheduled)
    (optimizer,), (one,) = module.configure_optimizers()
    scheduler, losses = one["scheduler"], []
    for inputs, wanted in 3 * batches_of(48, 12):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(inputs), wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    """Train two epochs, and a third that is resumed."""
    folder, config = sys.argv[1], json.loads(sys.argv[2])
    smp.init({"microbatches": 2, **config})
    replicas = smp.rdp_size() if config.get("prescaled_batch") else smp.dp_size()
    losses: list[float] = []
    for epochs in (2, 3):
        module, loader = made(Scheduled), DataLoader(samples(48), batch_size=12 // replicas)
        trainer = trainer_of(max_epochs=epochs, gradient_clip_val=0.05)
        trainer.fit(module, loader, ckpt_path=str(Path(folder, "resumed")) if epochs == 3 else None)
        trainer.save_checkpoint(Path(folder, "resumed"))
        losses += module.seen
    print(json.dumps({"losses": losses, "expected": expected()}))
    smp.shutdown()


if __name__ == "__main__":
    main()
