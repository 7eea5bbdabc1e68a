"""Trains by each trainer with a tracker, as a rank: ``LAYOUT FOLDER``; a tracker makes a file for each run."""

from __future__ import annotations

import sys
import uuid
import warnings
from pathlib import Path
from typing import Any

import lightning
import shardwright as smp
import torch
import transformers
from accelerate import tracking
from accelerate.utils import tqdm
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from shardwright.accelerate import Accelerator
from shardwright.huggingface import Trainer, TrainingArguments
from shardwright.lightning import ShardwrightStrategy
from torch import nn

#: Ranks of one replica, which have the same samples, and of two.
LAYOUTS = {"pp2": {"pipeline_parallel_degree": 2}, "dp2": {"ddp": True}}

STEPS = 2


class Run:
    """What a tracker keeps: a file of lines."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / uuid.uuid4().hex
        self.path.write_text("")

    def log(self, values: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(f"{sorted(values)}\n")


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": (x := torch.randn(4, generator=generator)), "labels": x.sum(0, keepdim=True)} for _ in range(16)]


class OfTransformers(transformers.TrainerCallback):
    """As the callbacks of transformers begin their runs, and log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: Run | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.run = Run(self.folder)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            assert self.run is not None, "it has begun"
            self.run.log(logs)


def by_transformers(folder: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        report_to=[],
        max_steps=STEPS,
        logging_steps=1,
        per_device_train_batch_size=4,
        use_cpu=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    tracker = OfTransformers(folder / "transformers")
    Trainer(Regression(), arguments, train_dataset=rows(), callbacks=[tracker]).train()


class OfAccelerate(tracking.GeneralTracker):  # type: ignore[misc]
    """As the trackers of accelerate begin their runs, and log."""

    name = "own"
    requires_logging_directory = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def tracker(self) -> Run:
        return self.run

    @tracking.on_main_process
    def start(self) -> None:
        self.run = Run(self.folder)

    @tracking.on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.log(values)

    @tracking.on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(values)


def by_accelerate(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=OfAccelerate(folder / "accelerate"))
    accelerator.init_trackers("own", config={"steps": STEPS})
    model = Regression()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(x, labels)["loss"]
        accelerator.backward(loss)
        return loss

    for number in tqdm(range(STEPS), desc="of accelerate"):
        batch = rows()[4 * number : 4 * number + 4]
        loss = train_step(model, *(torch.stack([row[name] for row in batch]) for name in ("x", "labels")))
        optimizer.step()
        accelerator.log({"loss": float(loss.reduce_mean())}, step=number)
    accelerator.end_training()
    ran: list[str] = []
    for decorator in ("on_main_process", "on_local_main_process", "on_last_process"):
        getattr(accelerator, decorator)(ran.append)(decorator)
    for index in range(2):
        accelerator.on_process(ran.append, process_index=index)(f"on_process {index}")
        accelerator.on_local_process(ran.append, local_process_index=index)(f"on_local_process {index}")
    print("ran:", ", ".join(ran), flush=True)


class OfLightning(Logger):
    """As the loggers of Lightning begin their runs, and log."""

    name, version = "own", 0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.run: Run | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self.run is None:
            self.run = Run(self.folder)
        return self.run

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.experiment.log(metrics)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.experiment.log({})


def by_lightning(folder: Path) -> None:
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

    trainer = lightning.Trainer(
        strategy=ShardwrightStrategy(),
        accelerator="cpu",
        logger=OfLightning(folder / "lightning"),
        max_steps=STEPS,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(), batch_size=4))  # type: ignore[arg-type]


def main() -> None:
    warnings.simplefilter("ignore")
    layout, folder = sys.argv[1], Path(sys.argv[2])
    smp.init({**LAYOUTS[layout], "microbatches": 2})
    torch.manual_seed(0)
    by_transformers(folder)
    by_accelerate(folder)
    by_lightning(folder)
    smp.shutdown()


if __name__ == "__main__":
    main()
