"""A module, data and a Trainer for checks of Lightning's strategy, and what they are compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import shardwright as smp
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from shardwright.lightning import ShardwrightStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.trainers.listed import Checks

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
CHECKS = Checks()
check = CHECKS.add
WIDTH = 40  # tensors of more than 4 KiB


def refused(text: str, call: Callable[[], Any], error: Any = MisconfigurationException) -> None:
    """The call raises this error, which says this."""
    with pytest.raises(error, match=text):
        call()


class Module(lightning.LightningModule):
    """A regression, in float64."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(8, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        ).double()
        self.seen: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        self.log("val_loss", nn.functional.mse_loss(outputs, batch[1]))
        return {"outputs": outputs}

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))


def made(kind: type[Module] = Module, *args: Any) -> Any:
    """A module, the same in every process."""
    torch.manual_seed(0)
    return kind(*args)


def samples(count: int) -> TensorDataset:
    """Inputs and what is to be predicted."""
    inputs = torch.randn(count, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1).sin())


def loader(count: int, size: int, **options: Any) -> DataLoader[Any]:
    """Batches of a size over all replicas."""
    return DataLoader(samples(count), batch_size=size // smp.dp_size(), **options)


def trainer_of(strategy: Any = None, **options: Any) -> lightning.Trainer:
    """A Trainer that says nothing."""
    given = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(FOLDER),
    }
    return lightning.Trainer(strategy=strategy or ShardwrightStrategy(), **{**given, **options})


def descended(module: Any, batches: list[Any], accumulated: int = 1, clip: Any = None, epochs: int = 1) -> list[float]:
    """The losses of plain training, as Lightning accumulates."""
    optimizer, losses = module.configure_optimizers(), []
    for _ in range(epochs):
        for number, (inputs, wanted) in enumerate(batches):
            if number % accumulated == 0:
                optimizer.zero_grad()
            loss = nn.functional.mse_loss(module(inputs), wanted)
            (loss / accumulated).backward()
            losses.append(float(loss.detach()))
            if (number + 1) % accumulated == 0 or number + 1 == len(batches):
                if clip is not None:
                    clip(module.parameters())
                optimizer.step()
    return losses


def batches_of(count: int, size: int) -> list[Any]:
    """Global batches, in order."""
    return list(DataLoader(samples(count), batch_size=size))


def same(ours: Any, theirs: Any, bar: float = 1e-9) -> None:
    """The numbers are equal but for rounding."""
    assert ours == pytest.approx(theirs, rel=bar), (ours, theirs)
