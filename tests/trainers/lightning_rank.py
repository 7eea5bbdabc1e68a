"""A process that trains by Lightning's Trainer: alone, or a rank by our strategy.

usage: python -m tests.trainers.lightning_rank KIND LAYOUT DTYPE FOLDER

Writes what it has seen to FOLDER/RANK.json. A rank trains a second time, with dropout, and resumes that in the middle.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, default_collate

from tests.trainers.layouts import LAYOUTS, Layout
from tests.trainers.models import KINDS, Kind, data

BATCH, EPOCHS, ACCUMULATED = 8, 3, 2


def counted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """How many labels the loss of a model is the mean of."""
    labels = batch["labels"]
    return (labels[:, 1:] if labels.dim() > 1 else labels).ne(-100).sum()


class Module(lightning.LightningModule):
    """A model of transformers."""

    def __init__(self, kind: Kind, dtype: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.model = kind.build(dropout).to(dtype)
        self.resumes = dropout > 0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        outputs = self.model(**batch)
        self.log("loss", outputs.loss)
        self.log("largest", outputs.logits.abs().max(), reduce_fx="max", on_step=True, on_epoch=True)
        return {"loss": outputs.loss, "logits": outputs.logits}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        outputs, labels = self.model(**batch), batch["labels"]
        logits = outputs.logits
        if labels.dim() > 1:
            logits, labels = logits[:, :-1], labels[:, 1:]
        hits = (logits.argmax(-1) == labels)[labels != -100].to(logits.dtype)
        self.log_dict({"val_loss": outputs.loss, "accuracy": hits.mean()}, add_dataloader_idx=True)
        self.log("hits", hits.sum(), reduce_fx="sum", on_step=False, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**{key: value for key, value in batch.items() if key != "labels"}).logits

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)
        by_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        by_epoch: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        if self.resumes:  # Lightning leaves a plateau out at the end of an epoch that is resumed
            by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [
            {"scheduler": by_step, "interval": "step"},
            {"scheduler": by_epoch, "monitor": "val_loss/dataloader_idx_0"},
        ]


class History(lightning.Callback):
    """Keeps what is logged, and the learning rate."""

    def __init__(self) -> None:
        self.kept: list[dict[str, float]] = []

    def _keep(self, trainer: Any, what: str) -> None:
        metrics = {f"{what} {key}": float(value) for key, value in trainer.callback_metrics.items()}
        rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else 0.0
        self.kept.append({"step": trainer.global_step, "rate": rate, **metrics})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["logits"].shape[0] == len(batch["labels"])
        self._keep(trainer, "batch")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._keep(trainer, "validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._keep(trainer, "epoch")


class Resumable(DataLoader[Any]):
    """A loader that goes on in the middle of an epoch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._given = self._skipped = 0

    def __iter__(self) -> Iterator[Any]:
        skipped, self._skipped = self._skipped, 0
        self._given = skipped
        for number, batch in enumerate(super().__iter__()):
            if number >= skipped:
                self._given = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._skipped = state["given"]


def loaders(kind: Kind, dtype: torch.dtype, replicas: int) -> tuple[DataLoader[Any], list[DataLoader[Any]]]:
    """What is trained on, and what is evaluated: batches of the same size over all replicas."""
    trained, evaluated = data(kind, dtype)
    size = BATCH // replicas
    return Resumable(trained, batch_size=size, collate_fn=default_collate), [
        DataLoader(one, batch_size=size) for one in evaluated.values()
    ]


def trainer_of(strategy: Any, folder: Path) -> tuple[lightning.Trainer, History]:
    """A Trainer, and what it fills."""
    history = History()
    monitored = {"monitor": "val_loss/dataloader_idx_0"}
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=0.5,
        val_check_interval=3,
        log_every_n_steps=1,
        callbacks=[
            history,
            ModelCheckpoint(str(folder / "best"), "{step}", **monitored),
            ModelCheckpoint(str(folder / "all"), "{step}", save_top_k=-1, every_n_train_steps=2),
            EarlyStopping(**monitored, patience=50),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer, history


def trained(strategy: Any, kind: Kind, dtype: torch.dtype, folder: Path, layout: Layout) -> tuple[Any, dict[str, Any]]:
    """Train to the end, test the best, predict."""
    torch.manual_seed(3)
    module, (trained_on, evaluated) = Module(kind, dtype, 0.0), loaders(kind, dtype, layout.replicas)
    trainer, history = trainer_of(strategy, folder)
    trainer.fit(module, trained_on, evaluated)
    best: Any = trainer.checkpoint_callbacks[0]
    tested = trainer.test(module, evaluated, ckpt_path="best", verbose=False)
    predicted = trainer.predict(module, evaluated[0])
    assert predicted is not None
    told = {
        "log": history.kept,
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score),
        "tested": {key: value for one in tested for key, value in one.items()},
        "predicted": [torch.cat([one for one in predicted]).double().abs().mean().item()],  # type: ignore[list-item]
        "rows": sum(len(one) for one in predicted),
    }
    return trainer, told


def main() -> None:
    """Train as the arguments say."""
    name, layout_name, dtype_name, folder = sys.argv[1:]
    kind, layout, dtype = KINDS[name], LAYOUTS[layout_name], getattr(torch, dtype_name)
    if layout_name == "plain":
        _, report = trained("auto", kind, dtype, Path(folder, "out"), layout)
        Path(folder, "0.json").write_text(json.dumps(report))
        return
    import shardwright as smp
    from shardwright.lightning import ShardwrightStrategy

    smp.init(layout.config)
    trainer, report = trained(ShardwrightStrategy(weight=counted), kind, dtype, Path(folder, "out"), layout)
    model = trainer.model
    predicted = smp.allgather(report["predicted"], smp.DP_GROUP)
    report["predicted"] = [sum(one for (one,) in predicted) / len(predicted)]
    report["rows"] = sum(smp.allgather(report["rows"], smp.DP_GROUP))
    stats = smp.stats()
    report["sent"] = stats["server"]["total"]["sent"]
    report["bytes_sent"] = smp.comm_stats()["bytes_sent"]
    report["held"] = [sum(p.numel() for p in model.local_parameters()), sum(p.numel() for p in model.parameters())]
    report["replaced"] = sum(one.substitute is not None for one in model.tensor_parallelism_report())

    logs = []
    for resumed_from in (None, "step=4.ckpt"):
        torch.manual_seed(3)
        trainer, history = trainer_of(ShardwrightStrategy(weight=counted), Path(folder, "resumed"))
        trained_on, evaluated = loaders(kind, dtype, layout.replicas)
        path = None if resumed_from is None else str(Path(folder, "resumed", "all", resumed_from))
        trainer.fit(Module(kind, dtype, 0.1), trained_on, evaluated, ckpt_path=path)
        logs.append(history.kept)
    report["whole"], report["resumed"] = logs
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    smp.shutdown()


if __name__ == "__main__":
    main()
