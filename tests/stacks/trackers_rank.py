"""Trains a step or two with a tracker, as a rank: ``LIBRARY TRACKER FOLDER``.

What the tracker keeps goes below the folder; see :mod:`tests.stacks.trackers`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from torch import nn

STEPS = 3


class Regression(nn.Module):
    """A model with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layers(x)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": (x := torch.randn(4, generator=generator)), "labels": x.sum(0, keepdim=True)} for _ in range(24)]


def by_transformers(tracker: str, folder: Path) -> None:
    from shardwright.huggingface import Trainer, TrainingArguments

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        report_to=[tracker],
        run_name="one",
        project="stacks",
        max_steps=STEPS,
        logging_steps=1,
        per_device_train_batch_size=4,
        use_cpu=True,
        save_strategy="no",
        trackio_space_id=None,
    )
    Trainer(Regression(), arguments, train_dataset=rows()).train()


def by_accelerate(tracker: str, folder: Path) -> None:
    from shardwright.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=str(folder / "tensorboard"))
    accelerator.init_trackers("stacks", config={"steps": STEPS})
    model = Regression()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(x, labels)["loss"]
        accelerator.backward(loss)
        return loss

    for number in range(STEPS):
        batch = rows()[4 * number : 4 * number + 4]
        loss = train_step(
            model, torch.stack([row["x"] for row in batch]), torch.stack([row["labels"] for row in batch])
        )
        optimizer.step()
        accelerator.log({"loss": float(loss.reduce_mean())}, step=number)
    accelerator.end_training()


def by_lightning(tracker: str, folder: Path) -> None:
    import lightning
    from lightning.pytorch import loggers
    from shardwright.lightning import ShardwrightStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Regression()

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    made: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: loggers.TensorBoardLogger(str(folder), name="tensorboard"),
        "wandb": lambda: loggers.WandbLogger(project="stacks", save_dir=str(folder), offline=True),
        "mlflow": lambda: loggers.MLFlowLogger("stacks", tracking_uri=os.environ["MLFLOW_TRACKING_URI"]),
    }
    trainer = lightning.Trainer(
        strategy=ShardwrightStrategy(),
        accelerator="cpu",
        logger=made[tracker](),
        max_steps=STEPS,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(), batch_size=4))  # type: ignore[arg-type]


def main() -> None:
    """Train as the arguments say."""
    library, tracker, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    smp.init(json.loads(os.environ["JOB"]))
    torch.manual_seed(0)
    {"transformers": by_transformers, "accelerate": by_accelerate, "lightning": by_lightning}[library](tracker, folder)
    smp.shutdown()


if __name__ == "__main__":
    main()
