"""A rank of a Lightning training that raises an error on one rank, in the place that the argument names."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import shardwright as smp
import torch
from shardwright.lightning import ShardwrightStrategy
from torch import nn
from torch.utils.data import DataLoader

WHERE = sys.argv[1]


class Module(lightning.LightningModule):
    """Fails in its second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def _fail(self, where: str, batch_idx: int) -> None:
        if where == WHERE and batch_idx == 1 and smp.rank() == (0 if where == "step" else smp.size() - 1):
            raise ValueError(f"in the {where}")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._fail("step", batch_idx)
        return self.model(batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._fail("hook", batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    trainer = lightning.Trainer(
        strategy=ShardwrightStrategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), DataLoader(torch.randn(32, 8), batch_size=4))


if __name__ == "__main__":
    main()
