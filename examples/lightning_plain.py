"""Trains a small network by Lightning's Trainer, and goes on from a checkpoint."""

import argparse
import json

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=12, help="samples per process")
    parser.add_argument("--folder", default="out/lightning")
    return parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        logits = self.model(inputs)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("accuracy", (logits.argmax(-1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)}


class History(lightning.Callback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluations: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(trainer.callback_metrics["loss"].item())

    def on_validation_end(self, trainer, pl_module):
        self.evaluations.append({key: trainer.callback_metrics[key].item() for key in ("val_loss", "accuracy")})


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    inputs = torch.randn(120, 8)
    samples = TensorDataset(inputs, inputs.sum(1).long() % 4)
    train, test = torch.utils.data.Subset(samples, range(96)), torch.utils.data.Subset(samples, range(96, 120))

    def trained(resumed_from: str | None = None) -> History:
        history = History()
        checkpoints = ModelCheckpoint(f"{options.folder}/checkpoints", "{epoch}", save_top_k=-1)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=options.epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            callbacks=[history, checkpoints],
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        torch.manual_seed(0)
        trainer.fit(
            Classifier(),
            DataLoader(train, batch_size=options.batch_size),
            DataLoader(test, batch_size=options.batch_size),
            ckpt_path=resumed_from,
        )
        return history

    whole = trained()
    again = trained(f"{options.folder}/checkpoints/epoch=0.ckpt")
    report = {"losses": whole.losses, "evaluations": whole.evaluations, "again": again.losses}
    rank_zero_only(print)(json.dumps(report))


if __name__ == "__main__":
    main()
